"""`/v1/status`: model, rendering, events."""
