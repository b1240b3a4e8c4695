"""When to take a snapshot. Pure: clock, step and measured costs are parameters."""
