"""What both ends of a server agree on: the wire and the record a running server leaves of itself."""
