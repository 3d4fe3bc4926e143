"""Attention on a paged cache, and the cache."""
