"""The cost of matching: one member, an index, a refresh. See `python benchmarks/matching`."""
