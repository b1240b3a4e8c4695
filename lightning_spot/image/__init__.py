"""Ground floor: what a snapshot is. Layout of a checkpoint file, its parts, checksums and manifest; no I/O."""
