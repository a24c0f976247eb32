"""CUDA where there is none: what is asked of it before its first use answers and starts nothing."""

from __future__ import annotations

import pytest
import torch

from holdfast.state.devices.cuda import CudaAccelerator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def test_devices_that_are_not_in_use_have_no_streams_and_no_random_state() -> None:
    assert CudaAccelerator().current_streams() == {}
    assert CudaAccelerator().rng_states() is None
    assert not torch.cuda.is_initialized()


def test_random_states_of_devices_that_are_not_here_are_left_out() -> None:
    CudaAccelerator().set_rng_states([torch.zeros(16, dtype=torch.uint8)])
    assert not torch.cuda.is_initialized()


def test_a_device_with_an_index_keeps_it() -> None:
    assert CudaAccelerator().with_index(torch.device("cuda", 3)) == torch.device("cuda", 3)


def test_a_machine_without_a_device_has_no_kernel() -> None:
    with pytest.raises((RuntimeError, OSError, AssertionError)):
        CudaAccelerator().digest_kernel(torch.device("cuda", 0))
