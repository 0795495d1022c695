"""One program per client; it runs in the client's own environment, with its pinned packages."""
