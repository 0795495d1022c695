"""Model families as tiny random checkpoints with published configurations, and their checks."""
