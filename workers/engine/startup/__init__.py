"""What a worker probes and measures of its model before it serves."""
