"""Takes snapshots of a live training state: layout, lease, copy, guard and commit in their order."""
