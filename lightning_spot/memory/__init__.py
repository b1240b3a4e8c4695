"""First floor: the memory node. A ring of slots with dirty bits, a flusher, an HTTP service, a client, ``spot://``.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
