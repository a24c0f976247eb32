"""The restore, in order."""
