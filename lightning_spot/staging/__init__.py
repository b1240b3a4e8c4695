"""Memory that snapshots are copied into, and the copying. No sockets, no Lightning."""
