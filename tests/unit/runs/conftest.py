"""The storages and the run that the tests of this folder ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import Run


@pytest.fixture(params=["memory", "folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStorage() if request.param == "memory" else LocalStorage(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(LocalStorage(tmp_path / "run"))
