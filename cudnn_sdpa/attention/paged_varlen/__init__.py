"""Attention of packed queries on a paged cache, by a kernel of the library's own."""
