"""What the benchmarks share: shapes, peers, timing, processes, output."""
