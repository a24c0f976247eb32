"""Exports of real runs: what is in the target, what is refused, and that a target is complete or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import CorruptCheckpointError, KeyExistsError, StorageError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.exporting.export import ExportItem, ExportJob, export
from holdfast.formats.exporting.read_ahead import ReadAhead
from holdfast.formats.hub.safetensors import SafetensorsSource
from holdfast.formats.own import OwnSource
from holdfast.formats.source import Fill, Source, TensorEntry
from tests.behaviour.test_subclasses import Scaled
from tests.sizes import if_deep, pairs


class Net(nn.Module):
    """Parameters of three types, a buffer of integers, an empty tensor, a scalar, and two names of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("wide", torch.arange(5, dtype=torch.float64))


def saved(folder: Path, state: Mapping[str, Any], **options: Any) -> Path:
    """Return a run with a checkpoint of this state."""
    run = folder / "run"
    with holdfast.CheckpointManager(run, dict(state), rng=False, mode="sync", **options) as manager:
        manager.save(1)
    return run


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two state dicts have the same names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and torch.equal(
            one[name].contiguous().view(-1).view(torch.uint8), other[name].contiguous().view(-1).view(torch.uint8)
        )
        for name in one
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path, {"model": Net()})


def others(folder: Path) -> list[str]:
    """Return what is beside the run."""
    return sorted(name for name in os.listdir(folder) if name != "run")


# What is written


def test_a_safetensors_file_has_the_tensors_of_the_model_under_its_names(tmp_path: Path) -> None:
    model = Net()
    run = saved(tmp_path, {"model": model})
    report = export(run, tmp_path / "out.safetensors", format="safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert same(found, model.state_dict())
    assert set(report.names) == set(found)
    assert report.bytes_written == (tmp_path / "out.safetensors").stat().st_size
    assert (report.path, report.format) == (tmp_path / "out.safetensors", "safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_two_exports_of_one_checkpoint_are_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        export(run, tmp_path / name, format="safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


@pytest.mark.parametrize("limit_bytes", [1, 300, 10**9])
def test_shards_are_no_larger_than_asked_and_the_index_names_each_tensors_file(
    tmp_path: Path, limit_bytes: int
) -> None:
    import json

    model = Net()
    run = saved(tmp_path, {"model": model})
    export(run, tmp_path / "out", format="safetensors", max_shard_bytes=limit_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    parts = {file.name: load_file(file) for file in files}
    assert same({name: tensor for part in parts.values() for name, tensor in part.items()}, model.state_dict())
    for part in parts.values():
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit_bytes
    if limit_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"


def test_a_file_name_with_max_shard_bytes_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without \.safetensors"):
        export(run, tmp_path / "out.safetensors", format="safetensors", max_shard_bytes=100)
    assert others(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", "float64"])
def test_dtype_converts_floating_point_tensors_alone(tmp_path: Path, dtype: str | torch.dtype) -> None:
    model = Net()
    run = saved(tmp_path, {"model": model})
    export(run, tmp_path / "out.safetensors", format="safetensors", dtype=dtype)
    kind = getattr(torch, str(dtype).removeprefix("torch."))
    wanted = {name: one.to(kind) if one.is_floating_point() else one for name, one in model.state_dict().items()}
    assert same(load_file(tmp_path / "out.safetensors"), wanted)


@pytest.mark.parametrize(("value", "fits"), [(65504.0, True), (70000.0, False), (float("inf"), True)])
def test_a_number_that_the_other_type_cannot_hold_is_an_error(tmp_path: Path, value: float, fits: bool) -> None:
    run = saved(tmp_path, {"model": {"small": torch.ones(3), "large": torch.tensor([1.0, value, -2.0])}})
    target = tmp_path / "out.safetensors"
    if fits:
        export(run, target, format="safetensors", dtype="float16")
        assert float(load_file(target)["large"][1]) == value
        return
    with pytest.raises(UsageError, match=r"large.*bfloat16"):
        export(run, target, format="safetensors", dtype="float16")
    assert others(tmp_path) == []


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, whose step counter bfloat16 cannot hold."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(1001.0)
    return model, optimizer


@pytest.mark.parametrize("foreign", [False, True], ids=["holdfast", "torch"])
def test_dtype_leaves_the_optimizer_as_it_is(tmp_path: Path, foreign: bool) -> None:
    model, optimizer = stepped()
    source = tmp_path / "source.pt"
    if foreign:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    else:
        source = saved(tmp_path, {"model": model, "optimizer": optimizer})
    export(source, tmp_path / "out.pt", format="torch", only=["model", "optimizer"], dtype="bfloat16")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(found["model"], {name: one.bfloat16() for name, one in model.state_dict().items()})
    for state, wanted in zip(found["optimizer"]["state"].values(), optimizer.state.values(), strict=True):
        assert same(state, wanted)


def test_dtype_converts_each_module_and_no_values_beside_it(tmp_path: Path) -> None:
    counters = {"tokens": torch.tensor(1001.0)}
    run = saved(tmp_path, {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2), "counters": counters})
    export(run, tmp_path / "out.pt", format="torch", only=["generator", "critic", "counters"], dtype="bfloat16")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {found[name]["weight"].dtype for name in ("generator", "critic")} == {torch.bfloat16}
    assert same(found["counters"], counters)


@pytest.mark.parametrize("only", ["optimizer", ["optimizer", "ema"]])
def test_dtype_without_a_model_is_refused(tmp_path: Path, only: str | list[str]) -> None:
    model, optimizer = stepped()
    run = saved(tmp_path, {"model": model, "optimizer": optimizer, "ema": {"w": torch.ones(2)}})
    with pytest.raises(UsageError, match=r"none of these is a model: optimizer"):
        export(run, tmp_path / "out.pt", format="torch", only=only, dtype="bfloat16")
    assert others(tmp_path) == []


def test_dtype_converts_tensors_by_name_that_are_exported_alone(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": nn.Linear(2, 2), "ema": {"w": torch.ones(2)}})
    export(run, tmp_path / "out.pt", format="torch", only="ema", dtype="bfloat16")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), {"w": torch.ones(2, dtype=torch.bfloat16)})


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("stored", "wanted", "value", "fits"),
    [
        ("float32", "float8_e4m3fn", 448.0, True),
        ("float32", "float8_e4m3fn", 449.0, False),
        ("float32", "float8_e4m3fn", -1e6, False),
        ("float32", "float8_e4m3fn", INFINITY, False),
        ("float32", "float8_e4m3fn", NAN, True),
        ("bfloat16", "float8_e4m3fnuz", 241.0, False),
        ("bfloat16", "float8_e4m3fnuz", -INFINITY, False),
        ("float32", "float8_e5m2", 57344.0, True),
        ("float32", "float8_e5m2", 57345.0, False),
        ("float32", "float8_e5m2", INFINITY, True),
        ("float8_e5m2", "float8_e4m3fn", 512.0, False),
        ("float8_e5m2", "float8_e4m3fn", NAN, True),
        ("float8_e5m2", "float8_e5m2fnuz", INFINITY, False),
        ("float8_e4m3fn", "float16", 448.0, True),
        ("float16", "float8_e8m0fnu", 0.0, False),
        ("float16", "float8_e8m0fnu", -1.0, False),
        ("float16", "float8_e8m0fnu", 4.0, True),
        ("float32", "float16", 65505.0, False),
        ("float64", "bfloat16", 1e300, False),
    ],
)
def test_a_number_outside_the_range_of_the_other_type_is_an_error_whatever_torch_makes_of_it(
    tmp_path: Path, stored: str, wanted: str, value: float, fits: bool
) -> None:
    tensor = torch.tensor([1.0, value, 2.0], dtype=torch.float64).to(getattr(torch, stored))
    run = saved(tmp_path, {"model": {"x": tensor}})
    if fits:
        export(run, tmp_path / "out.pt", format="torch", dtype=wanted)
        found = torch.load(tmp_path / "out.pt", weights_only=True)["x"]
        assert found.dtype == getattr(torch, wanted)
        assert torch.equal(found.float().nan_to_num(nan=-7.0), tensor.float().nan_to_num(nan=-7.0))
        return
    with pytest.raises(UsageError, match=f"'x'.*outside the range of {wanted}"):
        export(run, tmp_path / "out.pt", format="torch", dtype=wanted)
    assert others(tmp_path) == []


@pytest.mark.parametrize("dtype", ["int8", "bool", "bf16", torch.int64, "complex64"])
def test_a_type_that_is_no_floating_point_type_is_refused(run: Path, tmp_path: Path, dtype: str | torch.dtype) -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        export(run, tmp_path / "out.safetensors", format="safetensors", dtype=dtype)


def test_rename_changes_names_and_leaves_tensors_out(tmp_path: Path) -> None:
    model = Net()
    run = saved(tmp_path, {"model": model})
    rename = {"body.*.weight": "layers.*.w", "count": None}
    export(run, tmp_path / "out.safetensors", format="safetensors", rename=rename)
    wanted = {
        name.replace("body", "layers").replace("weight", "w")
        if name.startswith("body") and "weight" in name
        else name: t
        for name, t in model.state_dict().items()
        if name != "count"
    }
    assert same(load_file(tmp_path / "out.safetensors"), wanted)


def test_another_component_is_exported_by_its_name(tmp_path: Path) -> None:
    state = {"model": Net(), "ema": {"weights": {"a": torch.ones(2), "b": torch.zeros(3)}}}
    export(saved(tmp_path, state), tmp_path / "out.safetensors", format="safetensors", only="ema")
    assert load_file(tmp_path / "out.safetensors").keys() == {"weights.a", "weights.b"}


def test_a_checkpoint_and_an_open_source_are_sources_too(run: Path, tmp_path: Path) -> None:
    export(holdfast.resolve(run), tmp_path / "one.safetensors", format="safetensors")
    with SafetensorsSource(tmp_path / "one.safetensors") as source:
        export(source, tmp_path / "two.safetensors", format="safetensors")
        export(source, tmp_path / "three.safetensors", format="safetensors")
    one, two, three = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two == three


def test_values_that_are_no_tensors_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = saved(tmp_path, {"model": {"weight": torch.ones(2), "version": 3}})
    report = export(run, tmp_path / "out.safetensors", format="safetensors")
    assert report.left_out == ("version",)
    assert "version" in caplog.text
    assert load_file(tmp_path / "out.safetensors").keys() == {"weight"}


@holdfast.register_type
@dataclass
class OnlyHere:
    """A class that the process which exports does not know."""

    value: int = 1


@pytest.mark.slow
def test_a_component_that_is_not_exported_is_not_decoded(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": Net(), "other": {"thing": OnlyHere()}})
    done = run_script(
        """
        from holdfast.formats.exporting.export import export
        export(sys.argv[1], sys.argv[2], format="safetensors")
        """,
        run,
        tmp_path / "out.safetensors",
    )
    assert done.returncode == 0, done.stderr


# What is refused


def test_an_unknown_format_is_an_error_that_lists_those_there_are(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"onnx.*safetensors"):
        export(run, tmp_path / "out", format="onnx")


def test_a_format_that_is_only_read_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'holdfast' cannot be written"):
        export(run, tmp_path / "out", format="holdfast")


def test_a_missing_component_is_an_error_that_lists_those_there_are(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no component 'ema'.*: model"):
        export(run, tmp_path / "out.safetensors", format="safetensors", only="ema")
    assert others(tmp_path) == []


@pytest.mark.parametrize("only", ["", [], ["model", "model"], 3, ["model", 3]])
def test_an_only_that_names_no_component_is_refused(run: Path, tmp_path: Path, only: Any) -> None:
    with pytest.raises(UsageError, match="only="):
        export(run, tmp_path / "out.safetensors", format="safetensors", only=only)


def test_a_weights_format_takes_one_component(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": Net(), "other": {"x": torch.ones(1)}})
    with pytest.raises(UsageError, match="holds one component"):
        export(run, tmp_path / "out.safetensors", format="safetensors", only=["model", "other"])


def test_the_trained_part_of_a_model_is_no_whole_model(tmp_path: Path) -> None:
    model = Net()
    model.embedding.weight.requires_grad = False
    run = saved(tmp_path, {"model": holdfast.Trainable(model)})
    with pytest.raises(UsageError, match="peft"):
        export(run, tmp_path / "out.safetensors", format="safetensors")
    whole = saved(tmp_path / "whole", {"model": holdfast.Trainable(Net())})
    export(whole, tmp_path / "out.safetensors", format="safetensors")


def test_a_tensor_that_is_stored_in_parts_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": {"plain": torch.ones(2), "codes": Scaled.random(block=(1, 2))}})
    with pytest.raises(UsageError, match=r"codes.*Scaled"):
        export(run, tmp_path / "out.safetensors", format="safetensors")
    assert others(tmp_path) == []


def test_a_type_that_safetensors_has_no_name_for_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": {"z": torch.ones(2, dtype=torch.complex128)}})
    with pytest.raises(UsageError, match=r"complex128.*dtype="):
        export(run, tmp_path / "out.safetensors", format="safetensors")
    assert others(tmp_path) == []


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_target_that_exists_is_never_overwritten(run: Path, tmp_path: Path, make: Callable[[Path], None]) -> None:
    target = tmp_path / "out.safetensors"
    make(target)
    before = os.lstat(target)
    with pytest.raises(KeyExistsError, match="overwritten") as caught:
        export(run, target, format="safetensors")
    assert isinstance(caught.value, FileExistsError)
    with pytest.raises(KeyExistsError):
        export(run / "nothing", target, format="safetensors")
    assert os.lstat(target) == before
    assert others(tmp_path) == ["out.safetensors"]


def test_a_target_whose_folder_is_missing_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        export(run, tmp_path / "no" / "out.safetensors", format="safetensors")
    assert others(tmp_path) == []


@pytest.mark.parametrize("target", ["s3://bucket/x", "..", "/", 3])
def test_a_target_that_is_no_new_local_path_is_refused(run: Path, target: Any) -> None:
    with pytest.raises(UsageError, match="target"):
        export(run, target, format="safetensors")


class Huge(Source):
    """A source that claims more bytes than any disk has."""

    format: ClassVar[str] = "huge"

    @property
    def tree(self) -> Mapping[str, Any]:
        return {"weight": TensorEntry("weight", "float32", (1 << 30, 1 << 24))}

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        raise AssertionError("nothing is read when there is no room")


def test_no_room_on_the_disk_is_found_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="room") as caught:
        export(Huge("huge"), tmp_path / "out.safetensors", format="safetensors")
    assert caught.value.errno is not None
    assert others(tmp_path) == []


# Complete, or not there


def test_a_damaged_source_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    (file,) = run.glob("step-*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    for target in ("out.safetensors", "out"):
        with pytest.raises(CorruptCheckpointError, match="digest"):
            export(run, tmp_path / target, format="safetensors")
    assert others(tmp_path) == []


class Late(Format):
    """A format whose target another process takes while it is written."""

    name: ClassVar[str] = "late"

    def write(self, job: ExportJob, target: Path) -> None:
        target.mkdir()
        (target / "file").write_bytes(b"".join(map(bytes, job.pieces(job.items[0]))))
        (target.parent / job.name).mkdir()


def test_a_target_that_appears_meanwhile_is_not_replaced(run: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyExistsError):
        export(run, tmp_path / "out", format=Late())
    assert others(tmp_path) == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


class Sequential(Format):
    """A format of one's own: names and bytes, one after the other."""

    name: ClassVar[str] = "sequential"

    def write(self, job: ExportJob, target: Path) -> None:
        with target.open("wb") as file:
            for item in job.items:
                file.write(f"{item.name} {item.dtype}\n".encode())
                for piece in job.pieces(item):
                    file.write(piece)


def test_a_format_of_ones_own_gets_every_component_that_is_asked_for(tmp_path: Path) -> None:
    run = saved(tmp_path, {"model": {"a": torch.ones(2)}, "other": {"b": [torch.zeros(1, dtype=torch.int8)], "n": 1}})
    report = export(run, tmp_path / "out", format=Sequential(), only=["model", "other"], dtype="float64")
    assert report.names == ("model.a", "other.b.0")
    assert (tmp_path / "out").read_bytes() == b"model.a float64\n" + bytes(torch.ones(2).double().numpy()) + (
        b"other.b.0 int8\n\0"
    )
    assert report.left_out == ()


def run_script(text: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_of(text, *words), text=True, capture_output=True, timeout=120, **options)


def command_of(text: str, *words: object) -> list[str]:
    return [sys.executable, "-c", "import sys\n" + textwrap.dedent(text), *map(str, words)]


HELD = """
    import os
    import signal
    from holdfast.formats.exporting.export import export
    from holdfast.storage.local.local import LocalStorage

    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Held:
        def __init__(self, source):
            self.source = source
            self.size_bytes = source.size_bytes
        def read_into(self, offset, target):
            if offset > 1 << 25:
                # Several threads are here: each line and each wait is one call of the system.
                os.write(1, b"reading\\n")
                os.read(0, 1)
            self.source.read_into(offset, target)
        def close(self):
            self.source.close()
        def __enter__(self):
            return self
        def __exit__(self, *exception):
            self.close()

    class HeldStorage(LocalStorage):
        '''A storage that waits for a line in the middle of the tensors.'''
        def open(self, key):
            source = super().open(key)
            return Held(source) if key.endswith(".safetensors") else source

    try:
        export(HeldStorage(sys.argv[1]), sys.argv[2], format="safetensors")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with more tensors than a reader reads at once."""
    return saved(tmp_path_factory.mktemp("large"), {"model": {f"{n}": torch.zeros(1 << 20) for n in range(24)}})


@pytest.mark.slow
@pytest.mark.parametrize(("target", "how"), pairs(["out.safetensors", "out"], [signal.SIGINT, signal.SIGKILL]))
def test_an_interrupted_export_leaves_nothing_and_a_killed_one_only_a_partial(
    large: Path, tmp_path: Path, target: str, how: signal.Signals
) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command_of(HELD, large, tmp_path / target), **pipes) as process:
        assert process.stdout.readline() == "reading\n"
        assert [name for name in others(tmp_path) if name.endswith(".partial")] == others(tmp_path) != []
        os.kill(process.pid, how)
        # Only now, when the signal is there, the read goes on.
        rest, _ = process.communicate("\n" * 1000, timeout=120)
    if how == signal.SIGINT:
        assert rest.endswith("interrupted\n")
        assert others(tmp_path) == []
    else:
        (left,) = others(tmp_path)
        assert left.startswith(f".{target}.")
        assert left.endswith(".partial")


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["holdfast-sink", *if_deep("holdfast-read-ahead")])
def test_an_interrupt_before_a_thread_is_started_leaves_nothing(large: Path, tmp_path: Path, thread: str) -> None:
    done = run_script(
        """
        import threading
        from holdfast.formats.exporting.export import export

        def interrupt(frame, event, argument):
            # Where a signal's handler would raise: inside of start(), before the thread is there.
            if frame.f_code is threading.Thread.start.__code__ and frame.f_locals["self"].name == sys.argv[3]:
                raise KeyboardInterrupt

        sys.settrace(interrupt)
        try:
            export(sys.argv[1], sys.argv[2], format="safetensors")
        except KeyboardInterrupt:
            print("interrupted")
        """,
        large,
        tmp_path / "out",
        thread,
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert others(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["'bfloat16'", *if_deep("None")])
def test_the_memory_of_an_export_does_not_grow_with_the_tensors(tmp_path: Path, dtype: str) -> None:
    """One tensor of 640 MB, of which never more than a few pieces may be there."""
    limit = 300 << 20
    small = saved(tmp_path / "small", {"model": {"weight": torch.zeros(8)}})
    run = saved(tmp_path / "large", {"model": {"weight": torch.ones(160 << 20)}})
    done = run_script(
        f"""
        from pathlib import Path
        from holdfast.formats.exporting.export import export

        def peak():
            # Not ru_maxrss, in which a new process has the peak of the one that started it.
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

        export(sys.argv[1], sys.argv[3] + "/small.safetensors", format="safetensors", dtype={dtype})
        before = peak()
        export(sys.argv[2], sys.argv[3] + "/large.safetensors", format="safetensors", dtype={dtype})
        print(peak() - before)
        """,
        small,
        run,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < limit


# Reading ahead


def items_of(source: Source) -> Iterator[ExportItem]:
    for name, entry in source.tree["model"].items():
        yield ExportItem(name, entry, entry.dtype)


@pytest.mark.parametrize("order", [1, -1])
def test_items_that_are_asked_for_out_of_order_are_read_too(run: Path, order: int) -> None:
    with OwnSource.resolve(run) as source:
        items = list(items_of(source))
        with ReadAhead(source, items) as ahead:
            found = {item.name: b"".join(map(bytes, ahead.pieces(item))) for item in items[::order]}
        for item in items:
            assert found[item.name] == b"".join(map(bytes, source.pieces(item.entry)))


class Counted(OwnSource):
    """A source that notes which thread reads which tensors."""

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        self.reads = [*getattr(self, "reads", []), (threading.current_thread().name, len(fills))]
        super().read(fills, on_bytes)


@pytest.mark.parametrize("with_further_names", [True, False])
def test_small_tensors_are_read_together_also_when_further_names_are_left_out(
    run: Path, with_further_names: bool
) -> None:
    with Counted.resolve(run) as source:
        # The further name is in the middle: what follows it must still come from the thread.
        items = sorted((item for item in items_of(source) if item.size_bytes), key=lambda item: item.name)
        items.sort(key=lambda item: ["embedding.weight", "head.weight"].count(item.name), reverse=True)
        with ReadAhead(source, items) as ahead:
            for item in items:
                if with_further_names or item.name != "head.weight":
                    found = b"".join(map(bytes, ahead.pieces(item)))
                    assert found == b"".join(map(bytes, source.pieces(item.entry)))
        assert source.reads == [("holdfast-read-ahead", len(items))]


def test_a_reader_ahead_that_is_not_read_to_its_end_ends_its_thread(large: Path) -> None:
    with OwnSource.resolve(large) as source:
        items = list(items_of(source))
        with ReadAhead(source, items) as ahead:
            next(ahead.pieces(items[0]))
            assert [thread for thread in threading.enumerate() if thread.name == "holdfast-read-ahead"]
        assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-read-ahead"]
