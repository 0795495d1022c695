"""`paceline doctor`: measure what a model does on this machine, and say what to run."""
