"""Fused operations: norms, gates, convolutions and `graph_op` for graphs of one's own."""
