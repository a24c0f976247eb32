"""One checkpoint whose manifest has its digest and makes no sense: the rest of the run goes on, and it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager, KeepLast
from holdfast.ondisk.manifest import digest_of


def opened(run: Path, mode: Any = "sync", **more: Any) -> CheckpointManager:
    return CheckpointManager(run, {"model": torch.nn.Linear(3, 3)}, mode=mode, rng=False, **more)


def made(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    with opened(run) as manager:
        manager.restore()
        for step in (1, 2, 3):
            manager.save(step, metrics={"loss": 1.0 / step})
    return run


def change(run: Path, step: int, **fields: Any) -> None:
    """Write a manifest with other fields, and with the digest that it has then."""
    path = run / f"step-{step:09d}" / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    data = json.dumps({**body, **fields}, separators=(",", ":")).encode()
    path.unlink()
    path.write_bytes(b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (digest_of(data).encode(), data))


@pytest.mark.parametrize("name", ["../../outside.json", "a\nb"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_manifest_with_an_unsafe_file_name_stops_no_save(tmp_path: Path, mode: str, name: str) -> None:
    run = made(tmp_path)
    change(run, 3, files=[{"name": name, "size_bytes": 1, "digest": "0" * 64}])
    with opened(run, mode, keep=KeepLast(1)) as manager:
        result = manager.restore()
        assert result.step == 2
        assert [text.partition(":")[0] for text in result.passed_over] == ["step-000000003"]
        assert manager.save(3).wait().folder == "step-000000003.2"
        assert manager.save(4).wait().folder == "step-000000004"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_whose_manifest_became_unsafe_while_the_training_lives_is_saved_again(tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    with opened(run, mode) as manager:
        manager.restore()
        manager.save(1).wait()
        change(run, 1, files=[{"name": "../x", "size_bytes": 1, "digest": "0" * 64}])
        assert manager.save(1).wait().folder == "step-000000001.2"
