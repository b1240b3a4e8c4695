"""What both ends of a server agree on: the wire, slot memory, and the record a running server leaves of itself."""
