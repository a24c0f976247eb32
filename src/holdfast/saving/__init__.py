"""The save, in order."""
