"""What a snapshot server holds: a ring of slots, what is in them, and what is still to be done with it elsewhere.

In the order in which they are read best:

- ``runs``, ``slots``: what a run and a slot are, what a run's slots hold together, and what they owe.
- ``slot_choice``, ``ring``, ``area``: which slot a new snapshot gets; all slots under one lock; the same in tmpfs.
- ``registry``, ``uploads``: who may write a run; a leased slot until it holds something.
- ``tier``, ``reconcile``, ``observations``, ``worker``: what another server is asked; what is to be done, as a pure
  function of what was seen; what was seen; who does it.
- ``placement``, ``snapshot_server``, ``host``: where a run goes; all of it together; what a trainer asks of it.

A **destination** is a URL that a run's snapshots go to: storage, or another server; a *tier below* is one of either
kind. This server writes its **own** ones; those that a server behind it writes are **carried**. What is to be at a
destination, and was not seen there, is **owed**; **awaited** is the part of it that somebody waits for. What was seen
at one is **safe**.

A **register** is what one of several writers has put of a snapshot, once: its shard, or why there will be none. An
**order** sorts snapshots (attempt, step, kind); the **watermark** of a lineage is that of its newest committed one.
A slot is **leased** while it is filled: until it is sealed or aborted. From then on it **holds** its content, until
that is **evicted**; :class:`~lightning_spot.server.slots.View` and what it is made of have the rules.

Nothing here imports torch or Lightning, and nothing that comes over the network is ever unpickled.
"""
