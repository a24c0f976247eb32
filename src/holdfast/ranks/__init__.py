"""The only way to other processes of the training."""
