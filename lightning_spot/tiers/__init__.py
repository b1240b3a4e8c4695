"""First floor: durable places for snapshots. A store commits files with a manifest and gives them back, checked."""
