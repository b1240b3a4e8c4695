"""What others have published, re-implemented in small, to be measured beside us. None of it is meant for use.

Each file says what the paper (or its released code) does, what is simplified here, and where what was published had to
be mended so that what it saves can be restored. One rank, one device; the same Lightning checkpoint is saved by all.
"""
