"""Attention over dense tensors."""
