"""What a snapshot server holds: a ring of slots with dirty bits, a flusher, and the way to other servers.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
