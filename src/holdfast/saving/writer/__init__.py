"""The process that writes, and the messages between it and the training."""
