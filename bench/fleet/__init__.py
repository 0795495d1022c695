"""Routing rules on simulated fleets, and prefix affinity over two real gateways."""
