"""One checkpoint whose manifest has its digest and makes no sense: the rest of the run goes on, and it is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, KeepBest, KeepLast
from holdfast.errors import CheckpointNotFoundError, UsageError
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
        assert [text.partition(":")[0] for text in result.rejected] == ["step-000000003"]
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


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("keep", [KeepLast(1), KeepBest("loss", 1)], ids=["last", "best"])
@pytest.mark.parametrize("tagged", [False, True])
def test_a_metric_that_cannot_be_decoded_counts_as_unknown_and_its_checkpoint_is_named(
    tmp_path: Path, keep: Any, tagged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = made(tmp_path)
    change(run, 1, metrics={"loss": 10**400})
    if tagged:
        with opened(run) as manager:
            manager.tag(1, "release")
    with caplog.at_level(logging.WARNING, "holdfast"), opened(run, keep=keep) as manager:
        manager.restore()
        for step in (4, 5):
            manager.save(step, metrics={"loss": 0.1 * step})
        manager.wait()
        manager.prune()
        left = {found.step for found in manager.checkpoints()}
    assert not [text for text in caplog.messages if "tidied" in text or "cleanup" in text]
    assert [text for text in caplog.messages if "step-000000001" in text and "metrics" in text]
    # 5 is the newest, 3 and 4 the best of what was kept when it was decided.
    assert left - {1} in ({5}, {3, 5}, {4, 5})
    assert (1 in left) == tagged


def test_what_looks_through_metrics_leaves_out_those_that_cannot_be_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = made(tmp_path)
    change(run, 1, metrics={"loss": 10**400})
    assert holdfast.resolve(run, "best:loss").step == 3
    assert holdfast.resolve(run, "best:loss:max").step == 2
    assert holdfast.resolve(run, "best").step == 3
    with pytest.raises(CheckpointNotFoundError, match="metrics there are loss"):
        holdfast.resolve(run, "best:accuracy")
    with pytest.raises(UsageError, match="there are: loss"):
        holdfast.prune(run, KeepBest("accuracy", 1))
    assert {one.step: one.keep for one in holdfast.retention(run, KeepBest("loss", 1))} == {1: False, 2: False, 3: True}
    assert any("step-000000001" in text for text in caplog.messages)


def test_a_message_lists_the_first_ten_metrics_and_their_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    many = {f"m{number:06d}": 1.0 for number in range(20_000)}
    with caplog.at_level(logging.WARNING, "holdfast"), opened(run, keep=KeepBest("loss", 1)) as manager:
        manager.restore()
        manager.save(1, metrics=many)
        manager.wait()
    texts = [text for text in caplog.messages if "KeepBest" in text]
    change(run, 1, ranking=[])
    for work in (
        lambda: holdfast.resolve(run, "best"),
        lambda: holdfast.resolve(run, "best:loss"),
        lambda: holdfast.prune(run, KeepBest("loss", 1)),
    ):
        with pytest.raises(holdfast.HoldfastError) as caught:
            work()
        texts.append(str(caught.value))
    assert len(texts) == 4
    for text in texts:
        assert len(text) < 2000
        assert "m000009" in text
        assert "m000010" not in text
        assert "20,000" in text
