"""Kernels of decode steps that join an operation of attention with a fused one."""
