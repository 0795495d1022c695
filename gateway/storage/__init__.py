"""Records on disk and counters in memory."""
