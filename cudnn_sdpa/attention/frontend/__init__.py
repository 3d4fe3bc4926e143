"""The kernels of cuDNN's frontend as a provider of dense attention: compiled in helper processes, launched natively."""
