"""What a decode step computes besides attention, where operations of attention and fused ones share a kernel."""
