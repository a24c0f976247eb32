"""Attacks on the files of a real checkpoint: each is refused and named, changes nothing alive, and nothing on disk.

Two kinds of attackers. The first damages or replaces files; the digests find it. The second is a *forger*, who makes
the digests right again: then only what the content may say protects the reader.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    Report,
    StateMismatchError,
    StorageError,
    UnsafeContentError,
    UnsupportedFormatError,
)
from holdfast.ondisk.manifest import digest_of
from tests.security.scene import (
    FOLDER,
    MANIFEST,
    OWN,
    SHARED,
    TENSORS,
    Forger,
    Objects,
    bytes_on_disk,
    save_run,
    within,
)

FILES = (TENSORS, SHARED, OWN)
SECONDS = 60.0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pristine") / "run"
    save_run(run, 1)
    return run


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """A run with one checkpoint, of step 1, to attack."""
    target = tmp_path / "run"
    shutil.copytree(pristine, target, symlinks=True)
    yield target
    assert (tmp_path / "run").is_dir()


def refused(run: Path, selector: str | int = 1) -> tuple[Report | HoldfastError, HoldfastError]:
    """What `verify` and `restore` say of a checkpoint that must not be loaded; nothing may have changed by asking."""
    objects = Objects(7)
    alive, disk = objects.bits(), bytes_on_disk(run.parent)

    def check() -> Report | HoldfastError:
        try:
            return holdfast.verify(run, selector)
        except HoldfastError as error:
            return error

    def restore() -> HoldfastError:
        with holdfast.CheckpointManager(run, objects.components()) as manager:
            try:
                result = manager.restore(selector)
            except HoldfastError as error:
                return error
        raise AssertionError(f"it was loaded: {result}")

    said = within(SECONDS, check)
    error = within(SECONDS, restore)
    assert objects.bits() == alive, "a live object changed"
    assert bytes_on_disk(run.parent) == disk, "a file changed"
    return said, error


def damaged(run: Path, file: str) -> tuple[Report, HoldfastError]:
    """The same for damage that `verify` must report, in this file alone."""
    report, error = refused(run)
    assert isinstance(report, Report), report
    assert not report.ok
    assert {problem.file for problem in report.problems} == {file}
    assert isinstance(error, CorruptCheckpointError)
    assert file in str(error)
    return report, error


def test_the_checkpoint_that_is_attacked_here_is_sound(run: Path) -> None:
    assert holdfast.verify(run, 1).ok
    objects, original = Objects(7), Objects(1)
    with holdfast.CheckpointManager(run, objects.components()) as manager:
        assert manager.restore(1).restored == ("model", "optimizer", "ledger", "rng")
    for name, bits in original.bits().items():
        if name.startswith(("model", "optimizer")):
            assert objects.bits()[name] == bits, name
    assert objects.ledger.state == original.ledger.state


# --- other things in the place of a file ------------------------------------------------------------------------------


def as_link(path: Path) -> None:
    """A link to a good copy outside: the bytes are right, and still it leads out of the run."""
    outside = path.parent.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def as_endless_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_made_device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        pytest.skip("devices cannot be made here")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"x")


def as_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have at most 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def as_nothing(path: Path) -> None:
    path.unlink()


REPLACEMENTS = (as_link, as_endless_device, as_made_device, as_pipe, as_folder, as_socket, as_nothing)


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_in_the_place_of_one_is_refused(run: Path, file: str, replace: Callable[[Path], None]) -> None:
    replace(run / FOLDER / file)
    report, _ = damaged(run, file)
    assert report.problems[0].what
    quick = within(SECONDS, lambda: holdfast.verify(run, 1, depth="quick"))
    assert not quick.ok


@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
def test_what_is_no_file_in_the_place_of_the_manifest_is_refused(run: Path, replace: Callable[[Path], None]) -> None:
    replace(run / FOLDER / MANIFEST)
    said, error = refused(run)
    for one in (said, error):
        assert isinstance(one, CheckpointNotFoundError | CorruptCheckpointError | StorageError)
    with pytest.raises(HoldfastError):
        within(SECONDS, lambda: holdfast.resolve(run, 1))


@pytest.mark.guarantee("G9")
def test_a_link_in_the_place_of_a_checkpoints_folder_is_not_followed(run: Path) -> None:
    outside = run.parent / "outside"
    (run / FOLDER).rename(outside)
    (run / FOLDER).symlink_to(outside)
    for one in refused(run):
        assert isinstance(one, CorruptCheckpointError)
    for one in refused(run, FOLDER):
        assert isinstance(one, CorruptCheckpointError | CheckpointNotFoundError)


@pytest.mark.guarantee("G9")
def test_a_link_in_the_place_of_a_folder_inside_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    run, asset = tmp_path / "run", tmp_path / "vocabulary.txt"
    asset.write_text("a b c")
    with holdfast.CheckpointManager(run, Objects(1).components(), assets=[asset]) as manager:
        manager.save(1)
    assert holdfast.verify(run, 1).ok
    (run / FOLDER / "assets").rename(tmp_path / "outside")
    (run / FOLDER / "assets").symlink_to(tmp_path / "outside")
    report = holdfast.verify(run, 1)
    assert [problem.file for problem in report.problems] == ["assets/vocabulary.txt"]


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ["run.json", "latest", "best"])
def test_a_strange_run_record_or_link_does_not_lead_anywhere(run: Path, name: str) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    assert within(SECONDS, lambda: holdfast.resolve(run)).step == 1
    assert within(SECONDS, lambda: holdfast.verify(run)).ok


# --- damaged bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 4095, 4096, 0.5, -1])
@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_refused(run: Path, file: str, keep: float) -> None:
    path = run / FOLDER / file
    size = path.stat().st_size
    length = int(size * keep) if isinstance(keep, float) else keep if keep >= 0 else size + keep
    length = min(length, size - 1)
    os.truncate(path, length)
    report, _ = damaged(run, file)
    assert f"has {length} bytes, the manifest says {size}" in report.problems[0].what
    assert not holdfast.verify(run, 1, depth="quick").ok


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("more", [b"\0", b"\n", b"x" * 5000])
@pytest.mark.parametrize("file", FILES)
def test_an_extended_file_is_refused(run: Path, file: str, more: bytes) -> None:
    with (run / FOLDER / file).open("ab") as stream:
        stream.write(more)
    damaged(run, file)
    assert not holdfast.verify(run, 1, depth="quick").ok


@pytest.mark.guarantee("G9")
def test_a_file_that_was_made_huge_takes_no_memory(run: Path) -> None:
    for file in FILES:
        os.truncate(run / FOLDER / file, 1 << 40)  # sparse: it has no bytes on the disk
    tracemalloc.start()
    report, error = refused(run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(report, Report)
    assert {problem.file for problem in report.problems} == set(FILES)
    assert isinstance(error, CorruptCheckpointError)
    assert peak < 20_000_000


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def first_and_last_bytes(run: Path) -> list[tuple[str, str | None, int, tuple[int, int]]]:
    """Of each leaf, of the header and of each file of values: file, leaf, the place to hit, the range to be named."""
    forger = Forger(run / FOLDER)
    header = forger.record(TENSORS)["header_bytes"]
    places: list[tuple[str, str | None, int, tuple[int, int]]] = []
    for offset in (0, 7, 8, 9, header // 2, header - 1):
        places.append((TENSORS, None, offset, (0, header)))
    starts = sorted((tensor["chunks"][0]["start"], tensor["name"]) for tensor in forger.body["tensors"])
    ends = [start for start, _ in starts[1:]] + [forger.record(TENSORS)["size_bytes"]]
    for (start, leaf), end in zip(starts, ends, strict=True):
        places += [(TENSORS, leaf, start, (start, end)), (TENSORS, leaf, end - 1, (start, end))]
    for file in (SHARED, OWN):
        size = forger.record(file)["size_bytes"]
        places += [(file, None, offset, (0, size)) for offset in (0, size // 2, size - 1)]
    return places


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_a_flipped_bit_is_named_by_file_leaf_and_byte_range(run: Path) -> None:
    header = Forger(run / FOLDER).record(TENSORS)["header_bytes"]
    for file, leaf, offset, expected in first_and_last_bytes(run):
        path = run / FOLDER / file
        flip(path, offset)
        if (file, leaf) == (TENSORS, None):
            # The header is for other readers; restoring goes by the manifest and never looks at it.
            report = holdfast.verify(run, 1)
        else:
            report, error = damaged(run, file)
            if leaf is not None:
                assert f"bytes {expected[0]}-{expected[1]}" in str(error)
                assert leaf in str(error)
        assert [(problem.file, problem.leaf) for problem in report.problems] == [(file, leaf)], offset
        named = report.problems[0].byte_range
        assert named == expected or (leaf is None and named == (0, 8) and offset < 8 < header)
        flip(path, offset)
    assert holdfast.verify(run, 1).ok


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_several_damages_are_all_named(run: Path) -> None:
    flip(run / FOLDER / SHARED, 10)
    flip(run / FOLDER / OWN, 10)
    flip(run / FOLDER / TENSORS, 4096)
    flip(run / FOLDER / TENSORS, 12119)
    report, _ = refused(run)
    assert isinstance(report, Report)
    assert sorted((problem.file, problem.leaf or "") for problem in report.problems) == [
        (OWN, ""),
        (TENSORS, "model.1.num_batches_tracked"),
        (TENSORS, "rng@rank-00000.torch"),
        (SHARED, ""),
    ]


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_a_damaged_manifest_is_named_and_nothing_is_taken_from_it(run: Path) -> None:
    path = run / FOLDER / MANIFEST
    size = path.stat().st_size
    for offset in (0, 20, 60, 120, 140, size // 3, size // 2, size - 3, size - 2):
        flip(path, offset)
        for one in refused(run):
            assert isinstance(one, CorruptCheckpointError | UnsupportedFormatError)
            assert f"{FOLDER}/{MANIFEST}" in str(one)
        flip(path, offset)
    for length in (0, 1, size // 2, size - 2):
        data = path.read_bytes()
        os.truncate(path, length)
        for one in refused(run):
            assert isinstance(one, CorruptCheckpointError)
        path.write_bytes(data)
    assert holdfast.verify(run, 1).ok


# --- a forger's header ------------------------------------------------------------------------------------------------


def compact(header: dict[str, Any]) -> bytes:
    """Without the notes for other readers, so that there is room for a lie."""
    kept = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return json.dumps(kept, separators=(",", ":")).encode()


def lie(header: dict[str, Any], leaf: str, **changes: Any) -> bytes:
    return compact({**header, leaf: {**header[leaf], **changes}})


LEAF = "model.0.weight"

HEADER_LIES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "another shape": lambda header: lie(header, LEAF, shape=[3, 4]),
    "a larger shape": lambda header: lie(header, LEAF, shape=[400, 3]),
    "a huge shape": lambda header: lie(header, LEAF, shape=[2**62, 2**62], data_offsets=[0, 2**62]),
    "a huge tensor": lambda header: lie(header, LEAF, shape=[2**50], data_offsets=[8, 8 + 2**52]),
    "another type": lambda header: lie(header, LEAF, dtype="I32"),
    "an unknown type": lambda header: lie(header, LEAF, dtype="F7"),
    "another place": lambda header: lie(header, LEAF, data_offsets=[56, 104]),
    "a negative place": lambda header: lie(header, LEAF, data_offsets=[-48, 0]),
    "a tensor less": lambda header: compact({name: entry for name, entry in header.items() if name != LEAF}),
    "a tensor more": lambda header: lie({**header, "x": header[LEAF]}, "x"),
    "no header": lambda header: b"",
    "nesting": lambda header: b"[" * 4088,
}


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("attack", HEADER_LIES)
def test_a_forged_header_that_lies_is_reported_and_takes_no_memory(run: Path, attack: str) -> None:
    forger = Forger(run / FOLDER)
    forger.put_header(HEADER_LIES[attack](forger.header()))
    forger.sign()
    tracemalloc.start()
    report = holdfast.verify(run, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [problem.file for problem in report.problems] == [TENSORS]
    assert report.problems[0].byte_range == (0, 4096)
    assert peak < 5_000_000


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("length", [0, 4087, 4089, 2**31, 2**63, 2**64 - 1])
def test_a_forged_header_that_lies_about_its_own_length_is_reported(run: Path, length: int) -> None:
    forger = Forger(run / FOLDER)
    forger.put_header(compact(forger.header()), length=length)
    forger.sign()
    tracemalloc.start()
    report = holdfast.verify(run, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [problem.file for problem in report.problems] == [TENSORS]
    assert peak < 5_000_000


# --- a forger's manifest ----------------------------------------------------------------------------------------------


def huge_tensor(forger: Forger) -> None:
    """A leaf of a tebibyte in a file that is said to have one, each number right by itself."""
    leaf, record = forger.leaf("rng@rank-00000.torch"), forger.record(TENSORS)
    chunk = leaf["chunks"][0]
    leaf["shape"] = chunk["sizes"] = [1 << 40]
    record["size_bytes"] = chunk["start"] + (1 << 40)
    forger.body["block_bytes"] = 1 << 30
    chunk["digests"] = ["0" * 64] * (1 << 10)


def huge_values(forger: Forger) -> None:
    forger.record(SHARED)["size_bytes"] = 1 << 50


def unknown_leaf(forger: Forger) -> None:
    values = forger.values()
    values["trees"]["ledger"]["raw"] = {"$tensor": "nowhere"}
    forger.put(SHARED, json.dumps(values).encode())


def values_of_nobody(forger: Forger) -> None:
    values = forger.values()
    del values["trees"]["ledger"]
    forger.put(SHARED, json.dumps(values).encode())


@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "attack",
    [
        huge_tensor,
        huge_values,
        unknown_leaf,
        values_of_nobody,
    ],
)
def test_a_forged_manifest_that_promises_what_is_not_there_is_refused(
    run: Path, attack: Callable[[Forger], None]
) -> None:
    forger = Forger(run / FOLDER)
    attack(forger)
    forger.sign()
    tracemalloc.start()
    try:
        _, error = refused(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(error, CorruptCheckpointError)
    assert peak < 20_000_000


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("kind", [TENSORS, SHARED])
@pytest.mark.parametrize("name", ["../outside", "../../run/outside", "ABSOLUTE", "a/../../outside", "", ".", "a\\b"])
def test_a_manifest_that_names_a_file_outside_is_refused_as_unsafe(run: Path, kind: str, name: str) -> None:
    outside = run / "outside"
    shutil.copy(run / FOLDER / kind, outside)
    name = str(outside) if name == "ABSOLUTE" else name
    forger = Forger(run / FOLDER)
    forger.body = json.loads(json.dumps(forger.body).replace(json.dumps(kind), json.dumps(name)))
    forger.sign()
    for one in refused(run, FOLDER):
        assert isinstance(one, UnsafeContentError)
        assert MANIFEST in str(one)


@pytest.mark.guarantee("G9")
def test_a_manifest_that_names_what_a_storage_keeps_for_itself_is_refused(run: Path) -> None:
    (run / FOLDER / SHARED).rename(run / FOLDER / ".tmp-shared")
    forger = Forger(run / FOLDER)
    forger.body = json.loads(json.dumps(forger.body).replace(json.dumps(SHARED), json.dumps(".tmp-shared")))
    forger.sign()
    for one in refused(run, FOLDER):
        assert isinstance(one, UnsafeContentError)


@pytest.mark.guarantee("G3")
def test_the_manifest_of_another_folder_is_refused(run: Path) -> None:
    shutil.copytree(run / FOLDER, run / "step-000000002")
    for selector in (2, "step-000000002"):
        for one in refused(run, selector):
            assert isinstance(one, CorruptCheckpointError)
            assert "belongs to step-000000001" in str(one)
    assert holdfast.verify(run, 1).ok


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("field", ["metrics", "progress", "extra", "config"])
@pytest.mark.parametrize(
    "value",
    [
        {"$type": {"name": "os.system", "fields": {"command": "x"}}},
        {"$nothing": 1},
        {"$tensor": "model.0.weight"},
        json.loads("[" * 300 + "]" * 300),
    ],
    ids=["type", "tag", "tensor", "deep"],
)
def test_values_of_a_forged_manifest_run_nothing_and_are_refused_when_they_are_looked_at(
    run: Path, field: str, value: Any
) -> None:
    forger = Forger(run / FOLDER)
    forger.body[field] = value if field == "config" else {"x": value}
    forger.sign()
    checkpoint = holdfast.resolve(run, 1)
    with pytest.raises(HoldfastError):
        getattr(checkpoint, field)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("field", ["metrics", "progress", "extra"])
def test_a_forged_manifest_cannot_make_a_mapping_something_else(run: Path, field: str) -> None:
    forger = Forger(run / FOLDER)
    forger.body[field] = {"$tuple": [1, 2]}
    forger.sign()
    assert getattr(holdfast.resolve(run, 1), field) == {"$tuple": [1, 2]}, "its keys are only keys"


# --- a forger's values ------------------------------------------------------------------------------------------------


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def nested(depth: int, opening: str = "[", closing: str = "]", inner: str = "") -> bytes:
    return (opening * depth + inner + closing * depth).encode()


VALUES: dict[str, tuple[bytes, type[HoldfastError]]] = {
    "an unknown tag": (b'{"$pickle":"gASV"}', UnsupportedFormatError),
    "another unknown tag": (b'{"$object":{"class":"os.system"}}', UnsupportedFormatError),
    "an unregistered type": (b'{"$type":{"name":"os.system","fields":{"command":"x"}}}', StateMismatchError),
    "a builtin type": (b'{"$type":{"name":"builtins.eval","value":"1"}}', StateMismatchError),
    "a type without a name": (b'{"$type":{}}', CorruptCheckpointError),
    "a tag beside a key": (b'{"$bytes":"","x":1}', CorruptCheckpointError),
    "no base64": (b'{"$bytes":"***"}', CorruptCheckpointError),
    "an array without its bytes": (
        b'{"$ndarray":{"dtype":"<f8","shape":[1099511627776],"data":""}}',
        CorruptCheckpointError,
    ),
    "an array of objects": (b'{"$ndarray":{"dtype":"|O","shape":[1],"data":"AAAAAAAAAAA="}}', CorruptCheckpointError),
    "a factory that runs": (b'{"$defaultdict":{"factory":"eval","items":[]}}', CorruptCheckpointError),
    "nested lists": (nested(500), CorruptCheckpointError),
    "lists nested a million times": (nested(1_000_000), CorruptCheckpointError),
    "objects nested a million times": (
        nested(1_000_000, '{"x":', "}", "1"),
        CorruptCheckpointError,
    ),
    "tuples nested": (nested(200, '{"$tuple":[', "]}"), CorruptCheckpointError),
    "a dict that hashes a list": (b'{"$dict":[[[],1]]}', CorruptCheckpointError),
}


@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("attack", VALUES)
def test_forged_values_are_refused_before_anything_changes(run: Path, attack: str) -> None:
    text, expected = VALUES[attack]
    forger = Forger(run / FOLDER)
    values = forger.values()
    values["trees"]["ledger"]["raw"] = "@@"
    forger.put(SHARED, json.dumps(values).encode().replace(b'"@@"', text))
    forger.sign()
    tracemalloc.start()
    report, error = refused(run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The bytes are those that the manifest names: only what they say is wrong.
    assert isinstance(report, Report)
    assert report.ok
    assert type(error) is expected, error
    assert peak < 20_000_000 + 10 * len(text)


@pytest.mark.guarantee("G9")
def test_a_pickle_in_the_values_stays_bytes_and_runs_nothing(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(target))
    forger = Forger(run / FOLDER)
    values = forger.values()
    values["trees"]["ledger"]["raw"] = {"$bytes": base64.b64encode(bomb).decode()}
    forger.put(SHARED, json.dumps(values).encode())
    forger.sign()
    objects = Objects(7)
    with holdfast.CheckpointManager(run, objects.components()) as manager:
        manager.restore(1)
    assert objects.ledger.state["raw"] == bomb
    assert not target.exists()
    pickle.loads(bomb)
    assert target.exists(), "the bomb is a dud, and the test says nothing"


@pytest.mark.guarantee("G9")
def test_a_pickle_in_the_place_of_any_file_runs_nothing(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(target))
    for file in FILES:
        data = (run / FOLDER / file).read_bytes()
        (run / FOLDER / file).write_bytes(bomb)
        damaged(run, file)
        (run / FOLDER / file).write_bytes(data)
    for file in (SHARED, OWN):
        forger = Forger(run / FOLDER)
        data = (run / FOLDER / file).read_bytes()
        forger.put(file, bomb)
        forger.sign()
        refused(run)
        forger.put(file, data)
        forger.sign()
    (run / FOLDER / MANIFEST).write_bytes(bomb)
    refused(run)
    assert not target.exists()


ODD: tuple[Any, ...] = (None, True, -1, 2**70, 0.5, "x", [], [[]], {}, {"$tensor": "nowhere"}, {"$tuple": [1]})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def swept(values: Any, component: str, number: int) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Every place of a component's values with something odd in it, a few of the odd ones at each place in turn."""
    for count, path in enumerate(places(values["trees"][component], ("trees", component))):
        for turn in range(number):
            odd = ODD[(count * number + turn) % len(ODD)]
            changed = json.loads(json.dumps(values))
            spot = changed
            for key in path[:-1]:
                spot = spot[key]
            if spot[path[-1]] != odd:
                spot[path[-1]] = odd
                yield path, odd, changed


SWEEPS = (
    ("model", 11),
    ("ledger", 11),
    ("optimizer", 3),
)


@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(("component", "number"), SWEEPS)
def test_an_odd_value_at_any_place_is_taken_up_whole_or_changes_nothing(run: Path, component: str, number: int) -> None:
    forger = Forger(run / FOLDER)
    wrong = []
    for path, odd, changed in swept(forger.values(), component, number):
        forger.put(SHARED, json.dumps(changed).encode())
        forger.sign()
        objects = Objects(7)
        before = objects.bits()
        strategy = holdfast.LoadStrategy(only=("model", "optimizer", "ledger"))
        with holdfast.CheckpointManager(run, objects.components()) as manager:
            try:
                manager.restore(1, strategy=strategy)
            except HoldfastError as error:
                if objects.bits() != before:
                    wrong.append((path, odd, f"changed something, and then {error}"))
            except Exception as error:
                changed_too = "" if objects.bits() == before else " after something had changed"
                wrong.append((path, odd, f"{error!r}{changed_too}"))
    assert wrong == [], "\n".join(map(str, wrong))


class Extra(torch.nn.Module):
    """A module with a state that is no tensor."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), float(mark)))
        self.extra: Any = {"mark": mark}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("attack", [attack for attack in VALUES if "million" not in attack])
def test_a_modules_forged_extra_state_is_refused_before_its_weights_change(tmp_path: Path, attack: str) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, {"model": Extra(1)}) as manager:
        manager.save(1)
    forger = Forger(run / FOLDER)
    values = forger.values()
    values["trees"]["model"]["_extra_state"] = "@@"
    text, expected = VALUES[attack]
    forger.put(SHARED, json.dumps(values).encode().replace(b'"@@"', text))
    forger.sign()
    model = Extra(7)
    with holdfast.CheckpointManager(run, {"model": model}) as manager:
        with pytest.raises(expected):
            manager.restore(1)
    assert torch.equal(model.weight, torch.full((3,), 7.0))
    assert model.extra == {"mark": 7}


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", {"$tuple": [3, {"$tuple": [1, 2]}, None]}),
        ("python", None),
        ("numpy", {"bit_generator": "MT19937", "state": {}}),
        ("numpy", {"bit_generator": "os.system"}),
        ("torch", 5),
        ("torch", {"$bytes": "AAAA"}),
        ("other", 1),
    ],
)
def test_a_forged_random_state_is_refused_before_anything_changes(run: Path, name: str, value: Any) -> None:
    forger = Forger(run / FOLDER)
    values = forger.values(OWN)
    values["trees"]["rng@rank-00000"][name] = value
    forger.put(OWN, json.dumps(values).encode())
    forger.sign()
    refused(run)


# --- `latest` goes on -------------------------------------------------------------------------------------------------


def newer(run: Path) -> Path:
    """A second checkpoint, of step 2, to attack; the first stays sound."""
    save_run(run, 2)
    return run / "step-000000002"


def falls_back(run: Path, says: str) -> None:
    objects = Objects(7)
    with holdfast.CheckpointManager(run, objects.components()) as manager:
        result = within(SECONDS, manager.restore)
    assert (result.resumed, result.step) == (True, 1)
    assert [text for text in result.rejected if text.startswith("step-000000002: ") and says in text]
    assert objects.ledger.state == Objects(1).ledger.state
    for selector in (2, "step-000000002", "mark2"):
        refused_objects = Objects(7)
        before = refused_objects.bits()
        with holdfast.CheckpointManager(run, refused_objects.components()) as manager, pytest.raises(HoldfastError):
            manager.restore(selector)
        assert refused_objects.bits() == before


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("file", FILES)
def test_latest_falls_back_over_a_file_that_is_none(run: Path, file: str, replace: Callable[[Path], None]) -> None:
    replace(newer(run) / file)
    falls_back(run, file)


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_latest_falls_back_over_a_flipped_bit(run: Path, file: str) -> None:
    path = newer(run) / file
    flip(path, path.stat().st_size - 5)
    falls_back(run, file)


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
def test_latest_falls_back_over_a_manifest_that_is_no_file(run: Path, replace: Callable[[Path], None]) -> None:
    replace(newer(run) / MANIFEST)
    falls_back(run, "")


@pytest.mark.guarantee("G3")
def test_latest_falls_back_over_a_manifest_that_leads_out(run: Path) -> None:
    forger = Forger(newer(run))
    forger.record(OWN)["name"] = "../outside"
    next(tree for tree in forger.body["trees"] if tree["file"] == OWN)["file"] = "../outside"
    forger.sign()
    falls_back(run, "no safe file name")


def test_the_forger_makes_checkpoints_that_are_believed(run: Path) -> None:
    """Else every test here that forges would pass for the wrong reason."""
    forger = Forger(run / FOLDER)
    values = forger.values()
    values["trees"]["ledger"]["mark"] = 99
    forger.put(SHARED, json.dumps(values).encode())
    forger.put_header(compact(forger.header()))
    forger.sign()
    assert holdfast.verify(run, 1).ok
    objects = Objects(7)
    with holdfast.CheckpointManager(run, objects.components()) as manager:
        manager.restore(1)
    assert objects.ledger.state["mark"] == 99
    assert torch.equal(objects.model[0].weight, Objects(1).model[0].weight)
    assert holdfast.resolve(run, 1).digest == digest_of(json.dumps(forger.body, ensure_ascii=False).encode())
