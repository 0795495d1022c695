"""Other people's clients and load generators, unmodified, on a line that runs the demo model."""
