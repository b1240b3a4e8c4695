"""The server's end: an HTTP service around what the server holds, and the program that runs it.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
