"""PyTorch's own checkpoint API over Holdfast's files."""

from holdfast.formats.dcp.writer import HoldfastReader, HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
