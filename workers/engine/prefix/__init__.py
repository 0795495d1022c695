"""The prefix cache: its tree, its files, and its transfer between workers."""
