"""Second floor: the near end of a node.

Its requests, a session with the host's own node, a node as a store, ``spot://``.
"""
