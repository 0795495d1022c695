"""The data plane: one request from its first byte to accounting."""
