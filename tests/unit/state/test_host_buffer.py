"""Memory that devices copy from and to: where it begins, what is locked, and that nothing stays locked."""

from __future__ import annotations

import gc
import os

import pytest

from holdfast.errors import HoldfastError
from holdfast.state.host_buffer import HostBuffer
from holdfast.state.memory import HUGE_PAGE_BYTES
from tests.unit.state.devices.fake import FakeAccelerator


def test_the_view_and_the_tensor_are_the_same_memory_and_begin_at_a_huge_page() -> None:
    buffer = HostBuffer(3 * HUGE_PAGE_BYTES + 17)
    buffer.take_pages()
    assert buffer.tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert buffer.tensor.untyped_storage().data_ptr() == buffer.tensor.data_ptr(), "or torch takes it for not locked"
    assert buffer.tensor.nbytes == buffer.view.nbytes == 3 * HUGE_PAGE_BYTES + 17
    buffer.view[-1] = 7
    assert buffer.tensor[-1] == 7
    assert int(buffer.tensor.sum()) == 7


def test_what_was_locked_is_released_once_by_close_or_when_it_is_dropped() -> None:
    for drops in (False, True):
        accelerator = FakeAccelerator()
        buffer = HostBuffer(100)
        buffer.page_lock(accelerator)
        address = buffer.tensor.data_ptr()
        if not drops:
            buffer.close()
        del buffer
        gc.collect()
        assert accelerator.calls == [("page_lock", (address, 100)), ("undo_page_lock", address)]


def test_what_was_refused_is_not_undone() -> None:
    accelerator = FakeAccelerator(refuses=True)
    buffer = HostBuffer(100)
    with pytest.raises(RuntimeError, match="error 2 of this device"):
        buffer.page_lock(accelerator)
    buffer.close()
    assert accelerator.calls == []


def test_a_forked_child_undoes_no_lock_of_its_parent() -> None:
    accelerator = FakeAccelerator()
    buffer = HostBuffer(100)
    buffer.page_lock(accelerator)
    child = os.fork()
    if child == 0:
        buffer.close()
        os._exit(len(accelerator.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "only the lock that its parent made"
    buffer.close()


def test_memory_that_the_system_refuses_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(HoldfastError, match=r"refuses \d+ bytes of memory to read or write files through.*ulimit -v"):
        HostBuffer(1 << 60)
