"""The front door: inspect -> decide -> forward -> account, with the admin plane beside it."""
