"""Takes snapshots of a live training state: layout, lease, copy, guard and commit in their order.

In the order in which they are read best:

- ``tensors``, ``layouts``: which tensors only optimizers change; what this rank writes, and where each byte goes.
- ``device``, ``cuda``, ``batch``, ``copier``: all calls of CUDA; copies from GPUs; from CPUs, and the job; threads.
- ``partitions``, ``schedule``: how copies are cut; at which place of the next iteration each part goes.
- ``host_link``, ``slot_pool``: the ring on this host, which may be lost; its slots, made and leased in time.
- ``writer``: begins a snapshot on the training thread, and commits it on another one.
- ``unexpected``, ``attempt``: unforeseen errors; the writer from the claim to the end of the run.

A copy is **held** until training comes to its **place**, a number in the order of the iteration. On a GPU it is then
**enqueued**: put on a stream, whatever the host does meanwhile. A slot is **sealed** when the server has its checksums.
"""
