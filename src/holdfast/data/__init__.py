"""Data loaders that resume in the middle of an epoch."""

from holdfast.data.resumable import ResumableLoader
from holdfast.data.sampling import ResumableSampler

__all__ = ["ResumableLoader", "ResumableSampler"]
