"""Several gateways over one Redis."""
