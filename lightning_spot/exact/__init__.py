"""Third floor: what an exact resume needs beyond Lightning's checkpoint. Only this floor and the top know Lightning."""
