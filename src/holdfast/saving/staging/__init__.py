"""Copies of tensors in shared memory, from which the writer writes."""
