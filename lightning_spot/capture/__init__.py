"""Third floor: takes snapshots of a live training state. Layout, lease, copy, guard and commit in their order."""
