"""Fit a checkpoint to the live objects: which leaf goes where. Changes nothing; what does not fit is listed."""

from holdfast.loading.match.optimizers import Fitted, Place, SavedState, match

__all__ = ["Fitted", "Place", "SavedState", "match"]
