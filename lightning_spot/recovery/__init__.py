"""Second floor: finds the newest good snapshot over all tiers, checks it, and hands it over. Torch-free."""
