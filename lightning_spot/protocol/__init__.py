"""First floor: what both ends of a node agree on, the wire and the record a running node leaves of itself."""
