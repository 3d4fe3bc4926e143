"""What the ranks of `bench distributed` measure."""
