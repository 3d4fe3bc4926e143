"""Attention: arguments, masks and the reference, shared by dense, varlen, paged and FP8."""
