"""The engine compared with its peers, its decode steps, random schedules and memory."""
