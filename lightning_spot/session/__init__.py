"""One ``fit``: how it is resumed, when it takes snapshots, and how it ends."""
