"""What the gateway knows of engines: the report every worker makes, and who can make it."""
