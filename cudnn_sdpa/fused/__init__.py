"""Fused operations: norms, gated activations, convolutions, and `graph_op` for custom graphs."""
