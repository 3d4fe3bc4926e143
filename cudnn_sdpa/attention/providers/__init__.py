"""Whose kernels serve a call of attention: the choice between providers, and measured times that decide it."""
