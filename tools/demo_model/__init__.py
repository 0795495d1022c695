"""The training of the demo checkpoint."""
