"""HTTP/1.1 to clients and to workers."""
