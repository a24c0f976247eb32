"""Start the ranks of tests from one server that has imported torch, which saves most of their processor time.

Where each rank must be a new interpreter, `holdfast.testing.run_ranks` starts one, as a user's test does.
"""

from __future__ import annotations

from functools import partial

from holdfast.testing import run_ranks as start_ranks

__all__ = ["run_ranks"]

run_ranks = partial(start_ranks, start="forkserver", timeout_seconds=600.0)
