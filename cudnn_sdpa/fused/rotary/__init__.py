"""Rotary position embedding of queries and keys, after a norm of each head."""
