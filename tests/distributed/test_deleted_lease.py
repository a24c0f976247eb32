"""`lease/` deleted by hand, as people do, while its holder lives: two real processes, at every stage of the first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.runs.catalog import Catalog
from holdfast.storage.local.local import LocalStorage
from tests.sizes import some

ROOT = Path(__file__).parents[2]

# A training that stops at each line of its input, and says what came of each thing that it was asked to do.
TRAINING = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import holdfast, torch
from holdfast.storage.local.local import LocalStorage

class Stopping(LocalStorage):
    '''Stops, when it is told to, right before a key of that name is written.'''
    before = ""

    def put(self, key, data):
        self.stop(key)
        super().put(key, data)

    def create(self, key, size_bytes):
        self.stop(key)
        return super().create(key, size_bytes)

    def stop(self, key):
        if self.before and key.endswith(self.before):
            self.before = ""
            answer("stopped")
            sys.stdin.readline()

def answer(word):
    print(json.dumps(word), flush=True)

storage = Stopping(sys.argv[1])
model = torch.nn.Linear(2, 2)
manager = holdfast.CheckpointManager(
    "", {{"model": model}}, storage=storage, mode="sync", keep=holdfast.KeepLast(2), rng=False
)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    try:
        if word == "restore":
            answer(manager.restore().step)
        elif word == "stop":
            storage.before = rest
            answer("will")
        elif word == "save":
            answer(manager.save(int(rest)).wait().step)
        elif word == "prune":
            manager.prune()
            answer("pruned")
        elif word == "close":
            manager.close()
            answer("closed")
    except holdfast.HoldfastError as error:
        answer(type(error).__name__)
"""


class Training:
    """One process that trains, and is told what to do."""

    def __init__(self, run: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, words: str) -> Any:
        self.tell(words)
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)
        assert self._process.stdout is not None
        self._process.stdout.close()


def steps(run: Path) -> list[int]:
    return [found.step for found in holdfast.checkpoints(run)]


STAGES = ("between two saves", "attempt.json", "rank-00000.safetensors", "shared.json", "manifest.json")


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("stage", some(STAGES, 2))
def test_the_old_holder_commits_and_deletes_nothing_of_the_new_one(tmp_path: Path, stage: str) -> None:
    old, new = Training(tmp_path), Training(tmp_path)
    assert [old.ask(f"save {step}") for step in (1, 2, 3)] == [1, 2, 3]
    assert old.ask("prune") == "pruned", "no thread of it is at work any more, which would claim the run again"
    stopped = stage != "between two saves"
    if stopped:
        assert old.ask(f"stop {stage}") == "will"
        assert old.ask("save 4") == "stopped"
    shutil.rmtree(tmp_path / "lease")
    assert new.ask("restore") == 3
    assert [new.ask(f"save {step}") for step in (5, 6)] == [5, 6]
    assert new.ask("prune") == "pruned"
    before = steps(tmp_path)
    assert before == [6, 5]
    if stopped:
        assert old.ask("go on") in ("RunInUseError", "KeyExistsError", "StorageError")
    assert old.ask("save 7") == "RunInUseError"
    assert old.ask("prune") == "RunInUseError"
    old.ask("close")
    assert steps(tmp_path) == before
    assert [new.ask(f"save {step}") for step in (8, 9)] == [8, 9], "the old one released nothing of the new one"
    assert new.ask("prune") == "pruned"
    assert steps(tmp_path) == [9, 8]
    assert all(holdfast.verify(run=tmp_path, selector=step).ok for step in (8, 9))
    for training in (old, new):
        training.end()


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("stage", some(STAGES, 2))
def test_with_nobody_else_there_the_holder_goes_on(tmp_path: Path, stage: str) -> None:
    training = Training(tmp_path)
    assert [training.ask(f"save {step}") for step in (1, 2)] == [1, 2]
    assert training.ask("prune") == "pruned"
    if stage != "between two saves":
        assert training.ask(f"stop {stage}") == "will"
        assert training.ask("save 3") == "stopped"
    shutil.rmtree(tmp_path / "lease")
    if stage == "manifest.json":
        assert training.ask("go on") == 3, "it had looked just before"
    elif stage != "between two saves":
        assert training.ask("go on") == "RunInUseError"
    assert training.ask("save 4") == 4
    assert steps(tmp_path)[0] == 4
    numbers = [
        Catalog(LocalStorage(tmp_path)).attempts.record(found.folder).lease for found in holdfast.checkpoints(tmp_path)
    ]
    assert max(numbers) == numbers[0] == 2
    training.end()
