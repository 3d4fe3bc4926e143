"""Benchmarks: `python -m cudnn_sdpa bench …`. Numbers that are published come from here."""
