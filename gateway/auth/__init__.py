"""Keys of teams and programs: their owners, permissions, limits and usage."""
