"""Where the time of a run went: the ledger, its records beside the snapshots, the metric."""
