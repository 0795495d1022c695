"""Routing rules on simulated fleets."""
