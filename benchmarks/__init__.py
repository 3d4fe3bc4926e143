"""Benchmarks: `python -m benchmarks …` in the root of the repository; the source of all published figures."""
