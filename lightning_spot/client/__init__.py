"""The trainer's end of a server.

Its requests, a session with the host's own server, a server as a store, ``spot://``.
"""
