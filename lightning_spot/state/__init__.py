"""What an exact resume needs beyond Lightning's checkpoint. This package and those above it know Lightning."""
