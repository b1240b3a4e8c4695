"""Third floor: what an exact resume needs beyond Lightning's checkpoint. This floor and those above know Lightning."""
