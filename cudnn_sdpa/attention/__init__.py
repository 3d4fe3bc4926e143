"""Attention: what its kinds share."""
