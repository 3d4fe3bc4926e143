"""What cuDNN has attention kernels for, as data."""
