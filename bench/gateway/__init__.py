"""The gateway compared with its peers, its memory, and the cost of its policy."""
