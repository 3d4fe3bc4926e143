"""Attention: arguments, masks and the reference, shared by dense, varlen, paged, FP8 and packed paged."""
