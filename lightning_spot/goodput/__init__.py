"""Second floor: where the time of a run went. The ledger, its records beside the snapshots, the metric."""
