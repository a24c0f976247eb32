"""Fit a checkpoint to the live objects: which leaf goes where. Changes nothing; what does not fit is listed.

A checkpoint with its values, and live components, enter. For each component the memory to fill and the act that hands
the state over leave, or what is wrong.
"""

from holdfast.loading.match.component import match
from holdfast.loading.match.records import Fitted, Place, SavedState

__all__ = ["Fitted", "Place", "SavedState", "match"]
