"""Durable places for snapshots: a store commits files with a manifest and gives them back, checked."""
