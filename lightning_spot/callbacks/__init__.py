"""Top floor: the callbacks. Lightning's hooks, forwarded to what one ``fit`` has of resume, snapshots and exit."""
