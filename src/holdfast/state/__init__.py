"""Live objects to named tensors and back, and a rank's share of its machine. Knows torch; knows no checkpoints."""
