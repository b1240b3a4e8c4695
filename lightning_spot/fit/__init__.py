"""Fourth floor: one ``fit``. How it is resumed, when it takes snapshots, and how it ends."""
