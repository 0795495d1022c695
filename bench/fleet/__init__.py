"""Routing rules on simulated fleets, and two real gateways."""
