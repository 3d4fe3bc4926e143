"""The limits of cuDNN's attention kernels, as data."""
