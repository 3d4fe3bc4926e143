"""FlashAttention-4's kernels as a provider of dense attention: compiled in helper processes, launched natively."""
