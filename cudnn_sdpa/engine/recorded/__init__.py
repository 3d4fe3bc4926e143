"""Recorded launches: plans of cuDNN's whose kernels the native module launches itself."""
