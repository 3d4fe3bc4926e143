"""A cuDNN graph and its identity: knows no plan and no operation."""
