"""The random state of Python, NumPy, torch and devices: take it, check it, set it. Imports torch only when called."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import StateMismatchError

__all__ = ["RNGState", "check_rng_state", "get_rng_state", "random_state_kept", "set_rng_state"]


class RNGState:
    """The random state of Python, NumPy, torch and every device, as a component. One per rank."""

    def state_dict(self) -> dict[str, Any]:
        return get_rng_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_rng_state(state)

    def load_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Load after the number of ranks changed: go on from an old rank's state, and stay unlike all others.

        No exact answer exists here. Ranks that old states remain for take them; the others get a state that is derived
        from an old one and their own place, so that no two ranks draw the same numbers.
        """
        set_rng_state(states[index % len(states)])
        if index >= len(states):
            import numpy
            import torch

            # From torch's state alone: it is the one that scripts seed, so resuming twice gives the same numbers twice.
            source = bytes(torch.get_rng_state().numpy()) + f"/{index}".encode()
            seed = hashlib.blake2b(source, digest_size=8).digest()
            number = int.from_bytes(seed, "little")
            random.seed(number)
            numpy.random.seed(number % 2**32)
            torch.manual_seed(number)

    def __repr__(self) -> str:
        return "RNGState()"


def get_rng_state() -> dict[str, Any]:
    """Return the random state of this process: Python's, NumPy's, torch's on the CPU and on every device that is in
    use."""
    import numpy
    import torch

    from holdfast.state.devices import ACCELERATORS

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    return state | ACCELERATORS.rng_states()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the random state of this process back as it was, whatever runs inside."""
    before = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def check_rng_state(state: Any) -> None:
    """Refuse what is no random state, without touching the process's own."""
    import numpy
    import torch

    from holdfast.state.devices import ACCELERATORS

    kinds = {accelerator.type for accelerator in ACCELERATORS}
    names = set(state) if isinstance(state, Mapping) else set()
    if names - {"python", "numpy", "torch", *kinds} or not {"python", "numpy", "torch"} <= names:
        raise StateMismatchError(f"this is no random state: it has {sorted(map(str, names))}")
    try:
        random.Random().setstate(state["python"])
        numpy.random.RandomState().set_state(state["numpy"])
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise StateMismatchError(f"this is no random state of Python and NumPy: {error}") from None
    ours = torch.get_rng_state()
    for states in ([state["torch"]], *(state[kind] for kind in kinds & names)):
        if not isinstance(states, list) or not all(isinstance(one, torch.Tensor) for one in states):
            raise StateMismatchError("this is no random state of torch: it holds no tensors")
    if state["torch"].dtype != ours.dtype or state["torch"].shape != ours.shape:
        raise StateMismatchError("this is no random state of torch on a CPU: its size is another one")


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the random state of this process back. Devices that the state does not know keep theirs."""
    import numpy
    import torch

    from holdfast.state.devices import ACCELERATORS

    check_rng_state(state)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    ACCELERATORS.set_rng_states(state)
