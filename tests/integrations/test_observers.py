"""Prometheus, TensorBoard, W&B and MLflow get the events of real saves; a monitoring system that fails harms none."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.integrations.observers import Scalars, ScalarsObserver


def train(run: Path, *observers: Any, steps: int = 2, mode: Any = "sync") -> None:
    """Save some steps and restore the last."""
    model = torch.nn.Linear(4, 4)
    with holdfast.CheckpointManager(run, {"model": model}, mode=mode, observers=list(observers)) as manager:
        for step in range(steps):
            manager.save(step).wait()
        manager.restore()


class Recorder(ScalarsObserver):
    """Keeps what it is to write, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Scalars] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.error: Exception | None = None

    def write(self, scalars: Scalars) -> None:
        self.may_write.wait()
        if self.error is not None:
            raise self.error
        self.written.append(scalars)

    def numbers(self, name: str) -> list[tuple[int, float]]:
        return [(one.step, one.values[name]) for one in self.written if name in one.values]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_saves_and_restores_become_numbers_with_their_step(mode: str, tmp_path: Path) -> None:
    with Recorder() as recorder:
        train(tmp_path / "run", recorder, mode=mode)
    assert [step for step, _ in recorder.numbers("holdfast/save_seconds")] == [0, 1]
    assert all(seconds > 0 for _, seconds in recorder.numbers("holdfast/save_write_seconds"))
    assert all(size > 64 for _, size in recorder.numbers("holdfast/save_bytes"))
    assert [step for step, _ in recorder.numbers("holdfast/restore_read_seconds")] == [1]
    assert recorder.numbers("holdfast/committed_count") == [(0, 1.0), (1, 2.0)]
    assert len(recorder.numbers("holdfast/save_blocked_seconds")) == (2 if mode == "async" else 0)


def test_a_monitoring_system_that_hangs_delays_no_save(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.may_write.clear()
    train(tmp_path / "run", recorder, steps=3)  # would not return
    assert recorder.written == []
    recorder.may_write.set()
    recorder.close()
    assert [step for step, _ in recorder.numbers("holdfast/save_seconds")] == [0, 1, 2]


def test_events_that_wait_for_too_long_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.may_write.clear()
    for step in range(1100):
        recorder(holdfast.Event("committed", step, 0))
    assert [record.message for record in caplog.records] == [
        "Recorder is too slow: its events are dropped until it has caught up"
    ]
    recorder.may_write.set()
    assert recorder.flush()
    recorder(holdfast.Event("committed", 1100, 0))
    recorder.close()
    assert 1024 < len(recorder.written) < 1100
    assert recorder.numbers("holdfast/committed_count")[-1] == (1100, 1101.0)


def test_an_error_of_a_monitoring_system_is_logged_once_and_harms_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    recorder.error = ConnectionError("no route")
    with caplog.at_level(logging.WARNING, "holdfast"), recorder:
        train(tmp_path / "run", recorder)
    assert [record.message for record in caplog.records] == [
        "Recorder could not write an event: ConnectionError('no route'); no save is affected"
    ]
    assert [found.step for found in holdfast.checkpoints(tmp_path / "run")] == [1, 0]


def test_only_rank_0_writes_and_nothing_after_the_end() -> None:
    recorder = Recorder()
    recorder(holdfast.Event("committed", 1, 1))
    recorder(holdfast.Event("pruned", None, 0))
    recorder.close()
    recorder(holdfast.Event("committed", 2, 0))
    recorder.close()
    assert [one.values for one in recorder.written] == [{"holdfast/pruned_count": 1.0}]


def test_the_end_of_the_process_writes_what_is_waiting(tmp_path: Path) -> None:
    code = """
import holdfast, time
from holdfast.integrations.observers import ScalarsObserver
class Slow(ScalarsObserver):
    def write(self, scalars):
        time.sleep(0.05)
        print(scalars.step, flush=True)
observer = Slow()
for step in range(5):
    observer(holdfast.Event("committed", step, 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]


# Prometheus


@pytest.fixture
def registry() -> Any:
    client = pytest.importorskip("prometheus_client")
    return client.CollectorRegistry()


def test_prometheus_scrapes_counts_durations_and_the_last_step(registry: Any, tmp_path: Path) -> None:
    from prometheus_client import start_http_server
    from prometheus_client.parser import text_string_to_metric_families

    from holdfast.integrations.prometheus import PrometheusObserver

    observer = PrometheusObserver(registry=registry, labels={"run": "tiny"})
    train(tmp_path / "run", observer, steps=3)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    samples = {
        (sample.name, *sorted((name, value) for name, value in sample.labels.items() if name not in ("run", "rank"))):
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (sample.labels["run"], sample.labels["rank"]) == ("tiny", "0")
    }  # fmt: skip
    assert samples["holdfast_events_total", ("kind", "committed")] == 3
    assert samples["holdfast_events_total", ("kind", "restored")] == 1
    assert samples["holdfast_seconds_count", ("work", "save")] == 3
    assert samples["holdfast_phase_seconds_count", ("phase", "write"), ("work", "save")] == 3
    assert samples[("holdfast_last_committed_step",)] == 2
    assert samples["holdfast_bytes_total", ("work", "save")] == 3 * samples[("holdfast_last_committed_bytes",)]
    assert samples[("holdfast_last_committed_timestamp_seconds",)] > 1.7e9


def test_observers_of_one_registry_share_their_metrics(registry: Any) -> None:
    from holdfast.integrations.prometheus import PrometheusObserver

    for name in ("a", "b"):
        PrometheusObserver(registry=registry, labels={"run": name})(holdfast.Event("committed", 7, 0))
    value = registry.get_sample_value
    for name in ("a", "b"):
        labels = {"run": name, "rank": "0"}
        assert value("holdfast_last_committed_step", labels) == 7
    with pytest.raises(holdfast.UsageError, match="have the labels run, rank, not rank"):
        PrometheusObserver(registry=registry)
    with pytest.raises(holdfast.UsageError, match="'rank' is always a label"):
        PrometheusObserver(registry=registry, labels={"rank": "3"})


# TensorBoard, W&B, MLflow


def test_tensorboard_reads_the_numbers_of_each_save(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from holdfast.integrations.tensorboard import TensorBoardObserver

    with SummaryWriter(str(tmp_path / "board")) as writer, TensorBoardObserver(writer) as observer:
        train(tmp_path / "run", observer)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("holdfast/save_seconds")] == [0, 1]
    assert board.Scalars("holdfast/committed_count")[-1].value == 2
    assert "holdfast/restore_read_seconds" in board.Tags()["scalars"]


def test_wandb_gets_the_numbers_and_its_own_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from holdfast.integrations.wandb import WandbObserver

    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(holdfast.UsageError, match="there is no active W&B run"):
        WandbObserver()
    with wandb.init(mode="offline", dir=tmp_path, project="holdfast") as run:
        observer = WandbObserver()
        run.log({"loss": 1.0})
        train(tmp_path / "run", observer)
        observer.close()
        assert run.step == 1
        run.log({"loss": 0.5})
        assert run.step == 2
        assert run.summary["holdfast/committed_count"] == 2
        assert run.summary["holdfast/step"] == 1
        assert run.summary["holdfast/save_seconds"] > 0


def test_mlflow_gets_the_numbers_of_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from holdfast.integrations.mlflow import MlflowObserver

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with pytest.raises(holdfast.UsageError, match="there is no active MLflow run"):
        MlflowObserver()
    with mlflow.start_run() as active:
        observer = MlflowObserver()
        train(tmp_path / "run", observer)
        observer.close()
        history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "holdfast/save_seconds")
    assert sorted(metric.step for metric in history) == [0, 1]
