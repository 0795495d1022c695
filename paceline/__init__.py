"""What gateways and workers share; it imports neither, nor policies."""
