"""Checkpoints for distributed PyTorch training."""
