"""What is wrong with an installation, and its cure: `python -m cudnn_sdpa doctor`."""
