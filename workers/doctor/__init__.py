"""`paceline doctor`: measure a model on this machine, and recommend settings."""
