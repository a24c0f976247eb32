"""A small run to attack: its live objects, every bit of them, every byte on its disk, and a forger's tools."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

import holdfast
from holdfast.ondisk.manifest import digest_of, tensor_file_digest
from holdfast.storage.base import Storage

TENSORS = "rank-00000.safetensors"
SHARED = "shared.json"
OWN = "rank-00000.json"
MANIFEST = "manifest.json"
FOLDER = "step-000000001"

Result = TypeVar("Result")


class Ledger:
    """A component with values of many kinds, that counts how often it was given a state."""

    def __init__(self, mark: int) -> None:
        self.state: dict[str, Any] = {"mark": mark, "raw": bytes([mark] * 8), "pair": (mark, 0.5), "names": {"a", "b"}}
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)
        self.loads += 1


class Objects:
    """A model, its optimizer with state, and a component of our own."""

    def __init__(self, mark: int) -> None:
        generator = torch.Generator().manual_seed(mark)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01 * mark)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Drawn, not computed: the same mark must give the same bits, and a matrix product need not.
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers(), *moments):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)
        self.ledger = Ledger(mark)

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ledger": self.ledger}

    def bits(self) -> dict[str, object]:
        """Every bit that a restore could change, the process's random state too."""
        found: dict[str, object] = {f"model.{name}": bits_of(value) for name, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.model.parameters()):
            state = self.optimizer.state[parameter]
            found[f"optimizer.{number}"] = (
                {name: bits_of(state[name]) for name in state} if isinstance(state, dict) else repr(state)
            )
        found["groups"] = repr(self.optimizer.state_dict()["param_groups"])
        found["ledger"] = (repr(self.ledger.state.items()), self.ledger.loads)
        found["random"] = (random.getstate(), numpy.random.get_state()[1].tobytes(), bits_of(torch.get_rng_state()))
        return found


def bits_of(tensor: Any) -> object:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()


def save_run(run: Path | None, *steps: int, storage: Storage | None = None, rng: bool = True) -> None:
    """Save steps of objects whose mark is the step."""
    for step in steps:
        with holdfast.CheckpointManager(run or "", Objects(step).components(), rng=rng, storage=storage) as manager:
            manager.save(step, metrics={"loss": 1.0 / step}, progress={"tokens": step}, tag=f"mark{step}")


def bytes_on_disk(root: Path) -> dict[str, tuple[int, str]]:
    """What lies below a folder: the type of each name, and its bytes or where it points. Follows nothing."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode):
            with path.open("rb") as stream:  # of a sparse giant the beginning is enough
                content = f"{status.st_size} {hashlib.sha256(stream.read(10_000_000)).hexdigest()}"
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        found[str(path.relative_to(root))] = (status.st_mode, content)
    return found


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """What the work gives or raises; an AssertionError when it hangs."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it hangs: no answer after {seconds} s"
    if failure:
        raise failure[0]
    return outcome[0]


class Forger:
    """Changes a checkpoint and makes the digests right again, as somebody who wants it to be believed would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.body: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["manifest"]

    def record(self, name: str) -> dict[str, Any]:
        return next(file for file in self.body["files"] if file["name"] == name)

    def leaf(self, name: str) -> dict[str, Any]:
        return next(tensor for tensor in self.body["tensors"] if tensor["name"] == name)

    def values(self, name: str = SHARED) -> Any:
        return json.loads((self.folder / name).read_bytes())

    def put(self, name: str, data: bytes) -> None:
        """Other bytes in a file of values, with the manifest made to fit."""
        (self.folder / name).write_bytes(data)
        self.record(name).update(size_bytes=len(data), digest=digest_of(data))

    def header(self) -> dict[str, Any]:
        data = (self.folder / TENSORS).read_bytes()
        return json.loads(data[8 : self.record(TENSORS)["header_bytes"]])

    def put_header(self, text: bytes, *, length: int | None = None) -> None:
        """Another header of the same length, with the file's digest made to fit; `length` is what it says it has."""
        path, record = self.folder / TENSORS, self.record(TENSORS)
        size = record["header_bytes"]
        claimed = (size - 8 if length is None else length).to_bytes(8, "little")
        header = claimed + text.ljust(size - 8, b" ")
        assert len(header) == size
        path.write_bytes(header + path.read_bytes()[size:])
        chunks = [chunk for tensor in self.body["tensors"] for chunk in tensor["chunks"]]
        ordered = sorted(chunks, key=lambda chunk: chunk["start"])
        record["digest"] = tensor_file_digest(header, [digest for chunk in ordered for digest in chunk["digests"]])

    def sign(self, body: bytes | None = None) -> None:
        raw = json.dumps(self.body, ensure_ascii=False).encode() if body is None else body
        (self.folder / MANIFEST).write_bytes(
            b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (digest_of(raw).encode(), raw)
        )
