"""Snapshots of sharded state: what each rank writes of it, where it lies, and how it is read back on any number."""
