"""Several processes: DST."""
