"""The gateway beside its peers, and its memory and policy."""
