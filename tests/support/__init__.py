"""How a test gets what it needs; one builder for each, and no set-up by hand where one of these will do.

- **A server** without network: the fixture ``bench`` (several, or with settings: ``make_bench``), over stores that can
  be held up. On a port of this process: ``server.served``, or ``server.snapshot_server(root)`` for the usual one.
  As a process: the fixture ``start_server``. With snapshot servers of its own: ``with_servers``.
- **A rank** that writes snapshots: the fixture ``desk`` (``ranks.Desk``). Several as threads: ``ranks.Group`` and
  ``ranks.Rank``; sharded states as each rank has them: ``ranks.Sharded``. On machines of their own: ``machines``.
- **A trainer**: ``trainer.trainer(*callbacks).fit(Net(), data())`` with ``snapshots.spot`` or ``serverless``; it ends
  where ``StopAt``, ``StopAfter`` or ``StopIn`` says, ``At`` acts on the way, and ``check_all`` compares all that it
  saved with a ``Probe``.
- **A training in processes of its own**: ``program.run(python, train, root, **how)``, which gives its ``Outcome``; the
  fixture ``twin`` runs the same undisturbed, once. ``training.train`` has several ranks, DDP or in shards, on hosts and
  with servers as told, and is killed, told to stop or struck; others are in ``exact_cases`` and ``exact_sharded``.
- **A store**: ``store.GatedStore``; one that fails by plan is in ``faulty``; the fixture ``s3``, and ``real_stores``.
"""
