"""The accelerator of a device is found by the device's type, and nothing else of Holdfast names one."""

from __future__ import annotations

import torch

from holdfast.state.devices import ACCELERATORS, Accelerators
from tests.unit.state.devices.fake import FakeAccelerator

META = torch.device("meta")
HOST = torch.device("cpu")


def test_an_accelerator_is_found_by_the_type_of_the_device() -> None:
    one, other = FakeAccelerator("meta"), FakeAccelerator("xpu")
    accelerators = Accelerators([one, other])
    assert list(accelerators) == [one, other]
    assert accelerators.of(META) is one
    assert accelerators.of(torch.device("xpu", 3)) is other
    assert accelerators.of(HOST) is None


def test_devices_are_given_once_in_their_order_and_those_without_an_accelerator_not_at_all() -> None:
    kind = FakeAccelerator("xpu")
    devices = [torch.device("xpu", 1), HOST, torch.device("xpu", 0), META, torch.device("xpu", 1)]
    assert list(Accelerators([kind]).among(devices).items()) == [(devices[0], kind), (devices[2], kind)]


def test_random_states_are_stored_by_type_where_devices_are_in_use_and_set_again() -> None:
    used, unused = FakeAccelerator("xpu"), FakeAccelerator("meta")
    used.states = [torch.arange(4)]
    accelerators = Accelerators([used, unused])
    states = accelerators.rng_states()
    assert list(states) == ["xpu"]
    used.states = None
    accelerators.set_rng_states({"torch": torch.zeros(1), **states})
    assert used.states == states["xpu"]
    assert unused.states is None


def test_the_accelerators_of_this_release_are_known_by_their_types() -> None:
    assert [kind.type for kind in ACCELERATORS] == ["cuda"]
