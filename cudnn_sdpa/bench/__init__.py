"""Benchmarks: `python -m cudnn_sdpa bench …`; the source of all published figures."""
