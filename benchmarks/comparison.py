"""Measure how checkpoint libraries take damage, code in a file, another layout and a kill.

Each peer saves a small model by its own documented call and loads it in a new process. Nothing is timed: every answer
is yes or no, so a busy machine does not change it. Peers that are not installed are left out; answers that are not
asked for again are kept from the last run.

    pip install -c constraints.txt lightning transformers accelerate orbax-checkpoint jax
    python benchmarks/comparison.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import PEERS, Peer, numbers

RESULTS = Path(__file__).parent / "results"
# Saved by each peer. Incompressible, so that each bit of the largest file is one of the tensor's.
ELEMENTS = 1 << 20
# What a peer still has to write when the call has returned: much more than fits between two instructions.
KILLED_ELEMENTS = 128 << 20
FLIPS = 8
SAME, OTHER = "the same numbers", "other numbers"
TIMEOUT_SECONDS = 600


# What is done to a checkpoint


def flipped_bits(peer: str, scratch: Path) -> dict[str, Any]:
    """Flip one bit at a time in the largest file, and count the loads that return other numbers without an error."""
    folder = scratch / "checkpoint"
    in_process("save", peer, folder, ELEMENTS)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    silent, refused, unused = 0, 0, 0
    for number in range(FLIPS):
        place = largest.stat().st_size * (2 * number + 1) // (2 * FLIPS)
        with flipped(largest, place):
            answer = in_process("load", peer, folder, ELEMENTS)
        silent += answer == OTHER
        unused += answer == SAME
        refused += answer not in (OTHER, SAME)
    return {"loaded silently": silent, "refused": refused, "without effect": unused}


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))


def code_in_files(peer: str, scratch: Path) -> dict[str, Any]:
    """Put a call into each pickle of a checkpoint, one file at a time; see whether a load makes that call."""
    folder, proof = scratch / "checkpoint", scratch / "code-was-run"
    in_process("save", peer, folder, ELEMENTS)
    answers = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        original = path.read_bytes()
        if inject(path, proof):
            found = in_process("load", peer, folder, ELEMENTS)
            answers[path.name] = "runs" if proof.exists() else "without effect" if found == SAME else "refused"
            shutil.rmtree(proof, ignore_errors=True)
            path.write_bytes(original)
    return answers


def inject(path: Path, proof: Path) -> bool:
    """Let the pickle in this file make a folder when it is loaded. Return whether there is a pickle."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        pickles = [name for name in records if name.endswith("data.pkl")]
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, with_call(data, proof) if name in pickles else data)
        return bool(pickles)
    data = path.read_bytes()
    if data[:1] != pickle.PROTO or data[1] > pickle.HIGHEST_PROTOCOL:
        return False
    path.write_bytes(with_call(data, proof))
    return True


def with_call(data: bytes, proof: Path) -> bytes:
    text = str(proof).encode()
    call = b"cos\nmkdir\n(X" + len(text).to_bytes(4, "little") + text + b"tR0"
    return data[:2] + call + data[2:]


def killed_after_save(peer: str, scratch: Path) -> dict[str, Any]:
    """Kill the process when its call has returned, an asynchronous one too where there is one, and load."""
    answers = {}
    for act, meaning in (("save", "synchronous"), ("save_async", "asynchronous")):
        if hasattr(PEERS[peer], act):
            folder = scratch / act
            in_process(act, peer, folder, KILLED_ELEMENTS, killed=True)
            answers[meaning] = "kept" if in_process("load", peer, folder, KILLED_ELEMENTS) == SAME else "lost"
            shutil.rmtree(folder, ignore_errors=True)
    return answers


def saved_on_two(peer: str, scratch: Path) -> dict[str, Any]:
    """Save a tensor that is sharded over two ranks, or over two devices with Orbax, and load it in one."""
    if not hasattr(PEERS[peer], "save_on_two"):
        return {}
    in_process("save_on_two", peer, scratch / "checkpoint", ELEMENTS)
    same = in_process("load", peer, scratch / "checkpoint", ELEMENTS) == SAME
    return {"saved on 2, loaded on 1": SAME if same else "failed"}


def synced(peer: str, scratch: Path) -> dict[str, Any]:
    """Count the calls that make bytes or names durable in one save. None: a power cut may lose all of it."""
    log = scratch / "calls"
    calls = "fsync,fdatasync,sync,syncfs,sync_file_range,msync"
    in_process(
        "save", peer, scratch / "checkpoint", ELEMENTS, front=("strace", "-f", "-qq", "-e", calls, "-o", str(log))
    )
    return {"calls": sum("sync" in line.partition("(")[0] for line in log.read_text().splitlines())}


QUESTIONS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "flipped bit": flipped_bits,
    "code from the file": code_in_files,
    "killed after save": killed_after_save,
    "another number of ranks": saved_on_two,
    "calls that sync": synced,
}


NOTHING = dict.fromkeys(QUESTIONS, "not measured") | {"code from the file": "there is no pickle"}


# Processes and the table


def in_process(
    act: str, peer: str, folder: Path, elements: int, *, killed: bool = False, front: tuple[str, ...] = ()
) -> str:
    """Save or load in a new process. Return what a load found, or the last line of the error."""
    command = [*front, sys.executable, __file__, "--act", act, peer, str(folder), str(elements), *["--kill"] * killed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if act != "load" and done.returncode != (-signal.SIGKILL if killed else 0):
        raise SystemExit(f"{peer}: {act} failed:\n{done.stdout}{done.stderr}")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


def act_once(act: str, peer: str, folder: Path, elements: int, kill: bool) -> None:
    import torch

    if act == "load":
        same = torch.equal(PEERS[peer].load(folder, elements), numbers(elements))
        print(SAME if same else OTHER, flush=True)
        return
    getattr(PEERS[peer], act)(folder, elements)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)


def installed(peer: Peer) -> str | None:
    try:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in peer.packages)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(answers: dict[str, dict[str, dict[str, Any]]], versions: dict[str, str]) -> str:
    lines = [
        "## Damage, code, ranks and kills",
        "",
        f"| | {' | '.join(QUESTIONS)} |",
        "|---" * (len(QUESTIONS) + 1) + "|",
    ]
    for peer, found in answers.items():
        cells = [
            ", ".join(f"{name}: {value}" for name, value in found[one].items()) or NOTHING[one] for one in QUESTIONS
        ]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    lines += [
        "",
        f"- Flipped bit: {FLIPS} bits of the largest file, one at a time, each followed by a load.",
        "- Code: a call was put into each pickle, one file at a time, and loaded with the library's defaults.",
        f"- Killed: SIGKILL when the call returned, {KILLED_ELEMENTS * 4 / 1e9:.1f} GB; then a load in a new process.",
        "- Calls that sync: fsync and its like in one synchronous save. With none, nothing is durable when it returns.",
        "",
        "; ".join(dict.fromkeys(versions.values())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--questions", nargs="*", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--act", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.act:
        act, peer, folder, elements = given.act
        act_once(act, peer, Path(folder), int(elements), given.kill)
        return
    file = given.results / "comparison.json"
    known = json.loads(file.read_text()) if file.exists() else {"versions": {}, "answers": {}}
    for peer in given.peers:
        version = installed(PEERS[peer])
        if version is None:
            continue
        known["versions"][peer] = version
        for question in given.questions:
            with tempfile.TemporaryDirectory(prefix="comparison-") as scratch:
                known["answers"].setdefault(peer, {})[question] = QUESTIONS[question](peer, Path(scratch))
            print(f"{peer}: {question}: {known['answers'][peer][question]}", flush=True)
    given.results.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n")
    (given.results / "comparison.md").write_text(table(known["answers"], known["versions"]))


if __name__ == "__main__":
    main()
