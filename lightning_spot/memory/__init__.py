"""Second floor: what a memory node holds. A ring of slots with dirty bits, a flusher, and the chain to the next node.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
