"""Finds problems of an installation, with fixes: `python -m cudnn_sdpa doctor`."""
