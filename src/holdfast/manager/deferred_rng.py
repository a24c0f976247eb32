"""Keep the random state of a restored checkpoint until the training asks for it. A restored checkpoint enters; its
random state is set once, on all ranks.

Between a restore and the first step a framework builds iterators and fetches the first batch, which draws random
numbers. In the run that was saved this happened before the save: the random state belongs after it.
"""

from __future__ import annotations

import logging

from holdfast.errors import UsageError
from holdfast.loading.records import Loaded
from holdfast.ranks.base import Ranks, together

logger = logging.getLogger("holdfast")

__all__ = ["DeferredRNG"]


class DeferredRNG:
    """The random state that a manager has restored and not set yet, if any. The same on all ranks: where only some of
    them have a component for it, the others take part in the call."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._loaded: Loaded | None = None

    def replace(self, loaded: Loaded | None) -> None:
        """Forget what was not set yet, and keep the random state of this restore, where it is deferred."""
        self._loaded = loaded if loaded is not None and loaded.deferred else None

    def set(self) -> bool:
        """Set the random state on all ranks, once. Return whether there was one."""
        loaded = self._loaded
        if loaded is None:
            return False
        # It stays if a rank fails: what is saved then would have another random state.
        together(self._ranks, "restore_rng", loaded.set_rng, sends=None)
        self._loaded = None
        return True

    def require_set(self) -> None:
        """Raise if the training goes on without the random state: it would draw, and save, other numbers."""
        if self._loaded is not None:
            raise UsageError(
                f"the random state of step {self._loaded.checkpoint.step} was restored with rng='later' and is not set",
                advice="call restore_rng() before the first training step, after what the restart alone draws",
            )

    def warn_if_unset(self) -> None:
        """Warn at the end of a manager that the random state was never set."""
        if self._loaded is not None and self._ranks.rank == 0:
            logger.warning(
                "the manager is closed, and the random state of step %d, restored with rng='later', was never set: "
                "call restore_rng()",
                self._loaded.checkpoint.step,
            )
