"""The gateway compared with its peers, and small requests beside large bodies."""
