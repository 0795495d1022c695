"""The fields of a request: typed access, parser, profile, content."""
