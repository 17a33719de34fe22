"""What matching costs: one member, an index, a refresh. See `python benchmarks/matching`."""
