"""Preemption notices: where they come from, one small file each, and how ranks agree on what they do."""
