"""Folders of `torch.distributed.checkpoint`: read without a process group, and written."""
