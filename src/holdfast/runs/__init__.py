"""A run and its checkpoints. Knows no torch."""
