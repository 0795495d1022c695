"""Ten events of a fleet, and how fast an admin learns of each."""
