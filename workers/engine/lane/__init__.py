"""Lanes: which row reads or decodes next, and in which memory."""
