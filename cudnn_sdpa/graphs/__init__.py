"""Fused cuDNN operations as functions of tensors: `graph_op`, its torch operator, and the short way to plans."""
