"""The common part of gateways and workers; it imports neither, nor policies."""
