"""Mutate small files of every format and open them, in a process with a limit on its memory. Run as a module.

Arguments: a folder with seeds, one folder per kind; how many inputs in all; the number that the mutations follow from.
Prints one line of JSON: how many were opened, how many were refused, and what went wrong.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError

MEMORY_BYTES = 256 << 20
_INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF, *b"{}[]\"',:./\\0129eE-. ")
_NUMBERS = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_TOKENS = (b"..", b"/", b"../../x", b"null", b"1e999", b"-1", b"99999999999999999999", b'"', b"{", b"[", b"\\u0000")

Opener = Callable[[Path], None]


def main(seeds: Path, count: int, number: int) -> None:
    openers = _openers()
    _limit_memory()
    draw = random.Random(number)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    scratch = Path(tempfile.mkdtemp())
    kinds = sorted(folder.name for folder in seeds.iterdir())
    for index in range(count):
        kind = kinds[index % len(kinds)]
        changed = _mutated(seeds / kind, draw)
        path = _laid_down(scratch, seeds / kind, changed)
        try:
            openers[kind](path)
            outcomes[f"{kind} opened"] += 1
        except HoldfastError:
            outcomes[f"{kind} refused"] += 1
        except BaseException as error:
            wrong.append(f"{kind} {index}: {type(error).__name__}: {str(error)[:300]}")
            if len(wrong) >= 10:
                break
    print(json.dumps({"outcomes": outcomes, "wrong": wrong}))


def _limit_memory() -> None:
    with open("/proc/self/status") as status:
        size = next(int(line.split()[1]) for line in status if line.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)


# How each kind is opened


def _openers() -> dict[str, Opener]:
    import torch
    import torch.distributed.checkpoint

    from holdfast.formats.dcp_folders.dcp_folder import DCPFormat
    from holdfast.formats.hub.safetensors import SafetensorsFormat
    from holdfast.formats.nemo.nemo import NemoFormat
    from holdfast.formats.torch_files.torch_file import TorchFormat
    from holdfast.ondisk.manifest import check_manifest, decode_head, decode_manifest
    from holdfast.ondisk.manifest_body import decode_body, written_digest

    torch.ones(8).sum()

    def of(form: type) -> Opener:
        def opened(path: Path) -> None:
            form().detects(path)
            with form().open(path) as source:
                _read_all(source)

        return opened

    def decode(path: Path) -> None:
        data = path.read_bytes()
        decode_body(data, written_digest(data))
        decode_head(data)
        manifest, _ = decode_manifest(data)
        check_manifest(manifest)

    return {
        "safetensors": of(SafetensorsFormat),
        "torch": of(TorchFormat),
        "torch_legacy": of(TorchFormat),
        "nemo": of(NemoFormat),
        "nemo_folder": of(NemoFormat),
        "nemo_compressed": of(NemoFormat),
        "dcp": of(DCPFormat),
        "manifest": decode,
    }


def _read_all(source: object) -> None:
    from holdfast.formats.source import Source, tensors_of

    assert isinstance(source, Source)
    assert source.config is not source
    for asset in source.assets.values():
        asset.read()
    for entry in tensors_of(source.tree).values():
        for _ in source.pieces(entry):
            pass


# Mutations


def _mutated(seed: Path, draw: random.Random) -> tuple[Path, bytes]:
    """Return one file of a seed, and other bytes for it."""
    files = sorted(path for path in seed.rglob("*") if path.is_file())
    # Of a folder mostly its metadata: that is what is parsed.
    chosen = next((path for path in files if path.name == ".metadata" and draw.random() < 0.9), draw.choice(files))
    data = chosen.read_bytes()
    if draw.random() < 0.2:
        # As it is: without it what lies inside of a compressed or checked file would be all that is changed.
        return chosen, _changed(data, draw)
    return chosen, _changed_inside(seed.name, data, draw)


def _changed_inside(kind: str, data: bytes, draw: random.Random) -> bytes:
    """Return a file with a change of its content, and what vouches for that made right again, as an attacker would."""
    if kind == "manifest":
        return _signed(_changed(data, draw))
    if kind == "nemo_compressed":
        return gzip.compress(_changed_tar(gzip.decompress(data), draw), 1, mtime=0)
    if kind.startswith("nemo"):
        return _changed_tar(data, draw)
    if kind == "torch":
        return _with_pickle(data, draw)
    return _changed(data, draw)


def _changed(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        changed = _changed_once(changed, draw)
    return bytes(changed)


def _changed_tar(data: bytes, draw: random.Random) -> bytes:
    """Return a tar with other headers and the right checksums of them, or with one member changed."""
    if draw.random() < 0.5:
        return _with_checksums(_changed(data, draw))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        content = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    name = draw.choice(list(content))
    stream = io.BytesIO()
    _pack(stream, {**content, name: _changed(content[name], draw)}, "w:")
    return stream.getvalue()


def _with_pickle(data: bytes, draw: random.Random) -> bytes:
    """Return a zip file whose pickle is changed, with the right checksum of it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, _changed(content, draw) if name.endswith(".pkl") else content)
    return stream.getvalue()


def _changed_once(data: bytearray, draw: random.Random) -> bytearray:
    """Return the data with one change: a bit, a byte, a number, a cut, a copy of a part, a word."""
    at = draw.randrange(len(data) + 1)
    # Rather where something stands: much of a tar and of a zip file is padding.
    while at < len(data) and not data[at] and draw.random() < 0.95:
        at = draw.randrange(len(data) + 1)
    length = draw.choice((1, 2, 4, 8, 16, 64, 512))
    kind = draw.randrange(8)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = draw.choice(_INTERESTING)
    elif kind == 2:
        form = draw.choice(("<I", "<Q", ">I", ">Q"))
        packed = struct.pack(form, draw.choice(_NUMBERS) & ((1 << (8 * struct.calcsize(form))) - 1))
        data[at : at + len(packed)] = packed
    elif kind == 3:
        del data[at : at + length]
    elif kind == 4:
        data[at:at] = data[draw.randrange(len(data) + 1) :][:length]
    elif kind == 5:
        data[at:at] = draw.choice(_TOKENS)
    elif kind == 6:
        data[at : at + length] = draw.randbytes(length)
    else:
        del data[max(at, 1) :]
    return data or bytearray(b"\0")


def _signed(data: bytes) -> bytes:
    """Return a changed manifest with the digest that it should have: the attacker makes it right again."""
    from holdfast.ondisk.manifest import digest_of

    head, separator, body = data.partition(b'"manifest":')
    body = body.rstrip()[:-1]
    start = head.find(b'"digest":"')
    if not separator or start < 0:
        return data
    return head[: start + 10] + digest_of(body).encode() + head[start + 74 :] + separator + body + b"}\n"


def _with_checksums(data: bytes) -> bytes:
    """Return a changed tar with the checksums of its headers right again."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            block = blocks[start : start + 512]
            block[148:156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(blocks)


def _laid_down(scratch: Path, seed: Path, changed: tuple[Path, bytes]) -> Path:
    """Lay a seed down with one file changed, over what lay there before."""
    file, data = changed
    target = scratch / seed.name
    target.mkdir(exist_ok=True)
    for path in seed.rglob("*"):
        if path.is_file() and path != file:
            place = target / path.relative_to(seed)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists() or place.stat().st_size != path.stat().st_size or place.name == ".metadata":
                place.write_bytes(path.read_bytes())
    place = target / file.relative_to(seed)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    folder = seed.name == "dcp"
    return target if folder else place


# Seeds


def make_seeds(folder: Path) -> None:
    """Write the smallest file of each kind that has everything in it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from tests.security.scene import FOLDER, MANIFEST, save_run

    state = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(1)}

    def place(kind: str, name: str) -> Path:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        return folder / kind / name

    save_file({name: value.contiguous() for name, value in state.items()}, place("safetensors", "m"))
    tree = {"model": state, "values": [1, 2.5, "x", None, True, (3,)], "big": 1 << 70}
    torch.save(tree, place("torch", "m"))
    torch.save(tree, place("torch_legacy", "m"), _use_new_zipfile_serialization=False)
    dcp.save({**state, "step": 3}, checkpoint_id=place("dcp", ""), no_dist=True)
    save_run(folder.parent / "run", 1, rng=False)
    place("manifest", MANIFEST).write_bytes((folder.parent / "run" / FOLDER / MANIFEST).read_bytes())
    weights = io.BytesIO()
    torch.save({"a": torch.ones(2)}, weights)
    config = {"model_config.yaml": b"a: 1e-3\nb: [1, {c: 'x'}]\n", "t.model": b"t"}
    members = {f"model_weights/{path.name}": path.read_bytes() for path in sorted((folder / "dcp").iterdir())}
    _pack(place("nemo", "m"), {**config, "model_weights.ckpt": weights.getvalue()}, "w:")
    _pack(place("nemo_folder", "m"), {**config, **members}, "w:")
    _pack(place("nemo_compressed", "m"), {**config, "model_weights.ckpt": weights.getvalue()}, "w:gz")


def _pack(target: Path | io.BytesIO, content: dict[str, bytes], mode: str) -> None:
    stream = target.open("wb") if isinstance(target, Path) else target
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, data in content.items():
            info = tarfile.TarInfo(f"./{name.removeprefix('./')}")
            info.size, info.mtime = len(data), 1.5
            archive.addfile(info, io.BytesIO(data))
    if isinstance(target, Path):
        stream.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
