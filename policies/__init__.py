"""The routing policy: its inputs, its document and its decisions."""
