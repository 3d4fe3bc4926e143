"""Attention: the public functions, their torch operators, graphs and reference."""
