"""What the ranks of `benchmarks distributed` measure."""
