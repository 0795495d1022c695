"""What a request asks: fields, parser, profile, content."""
