"""Attention in FP8, with given scales and with delayed scaling."""
