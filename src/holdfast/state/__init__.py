"""Live objects to named tensors and back. Knows torch; knows no files and no ranks."""
