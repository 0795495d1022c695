"""The routing policy: what it may look at, how it is written, and how it decides."""
