"""Probes and measurements of a model before its worker serves."""
