"""Kinds of accelerators are named in `state/devices` alone, so that another one is another file there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import SOURCE
from tests.architecture.names import uses_of

DEVICES = SOURCE / "state" / "devices"
KINDS = ["cuda", "rocm", "xpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_module_outside_of_the_devices_names_a_kind_of_accelerator(kind: str) -> None:
    # Integrations call other people's functions by the names that these have.
    assert [use for use in uses_of(kind, SOURCE, outside=DEVICES) if not use.startswith("integrations/")] == []


def test_the_devices_name_theirs() -> None:
    assert uses_of("cuda", DEVICES, outside=DEVICES / "nothing")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.cuda.synchronize()\n",
        "\ndef held(tensor): return tensor.is_cuda\n",
        "\nSAMPLED = {'cuda': 24}\n",
        "\nfrom torch.cuda import Stream\n",
        "\nclass CudaCarrier: ...\n",
        "\ndef copy(cuda_stream): ...\n",
    ],
)
def test_a_name_in_code_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    (found, *_) = uses_of("cuda", tmp_path, outside=tmp_path / "devices")
    assert found.startswith("module.py:2:")
    assert uses_of("cuda", tmp_path, outside=tmp_path) == []


def test_a_name_in_a_comment_or_a_description_is_no_use_of_it(tmp_path: Path) -> None:
    text = '"""As on CUDA."""\nLIMIT = 1  # of CUDA\n"""A limit of CUDA."""\n\ndef held():\n    """Return CUDA\'s."""\n'
    (tmp_path / "module.py").write_text(text)
    assert uses_of("cuda", tmp_path, outside=tmp_path / "devices") == []
