"""The format: bytes to values and back. No input or output, no torch."""
