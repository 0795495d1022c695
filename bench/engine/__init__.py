"""The engine beside its peers, and its rounds, schedules and memory."""
