"""What a snapshot server holds: a ring of slots with dirty bits, and what is to be done with them.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
