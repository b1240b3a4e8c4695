"""What a snapshot is: layout of a checkpoint file, its parts, checksums and manifest; no I/O."""
