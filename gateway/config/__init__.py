"""Settings, the policy store, static workers and start-up checks."""
