"""FlashAttention-4's kernels as a provider of attention: compiled in helper processes, launched natively."""
