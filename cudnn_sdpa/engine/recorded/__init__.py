"""Recorded launches: plans whose kernels the native module launches itself."""
