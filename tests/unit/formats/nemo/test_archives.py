"""Tar archives are read member by member: what tar writes is listed, and whatever is odd about one is refused."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError, UnsafeContentError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.nemo.archives import MAX_MEMBERS, Archive, is_archive

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
CONTENT = {"model_config.yaml": b"a: 1\n", "model_weights/__0_0.distcp": bytes(range(256)) * 9, "empty.txt": b""}


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def packed(
    path: Path,
    members: list[tuple[tarfile.TarInfo, bytes]],
    *,
    form: int = tarfile.PAX_FORMAT,
    mode: str = "w:",
) -> Path:
    with tarfile.open(path, mode, format=form) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def plain(path: Path, content: dict[str, bytes], **options: object) -> Path:
    return packed(path, [(member(name), data) for name, data in content.items()], **options)  # type: ignore[arg-type]


def listed(path: Path) -> dict[str, bytes]:
    with Archive.open(path) as archive:
        return {name: part.read(0, part.size_bytes) for name, part in archive.members.items()}


def refused(path: Path) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        listed(path)
    assert caught.value.file == str(path)
    return caught.value


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
@pytest.mark.parametrize("form", FORMS)
def test_members_are_listed_with_their_bytes(tmp_path: Path, form: str, mode: str) -> None:
    path = plain(tmp_path / "a.nemo", CONTENT, form=FORMS[form], mode=mode)
    assert listed(path) == CONTENT
    assert list(listed(path)) == list(CONTENT)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_that_was_added_as_a_whole_is_listed(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "content"
    for name, data in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    with tarfile.open(tmp_path / "a.tar", "w:", format=FORMS[form]) as archive:
        archive.add(folder, arcname=".")
    assert listed(tmp_path / "a.tar") == CONTENT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [90, 150, 220, 240])
def test_long_names_are_read_in_every_form(tmp_path: Path, form: str, length: int) -> None:
    name = f"{'f' * 90}/{'g' * (length - 91)}" if length > 90 else "h" * 90
    if form == "ustar" and length > 190:
        pytest.skip("the form has no room for such a name")
    assert listed(plain(tmp_path / "a.tar", {name: b"x", "other": b"y"}, form=FORMS[form])) == {
        name: b"x",
        "other": b"y",
    }


def test_a_name_outside_of_ascii_is_read(tmp_path: Path) -> None:
    assert listed(plain(tmp_path / "a.tar", {"wörter/é.txt": b"x"})) == {"wörter/é.txt": b"x"}


def test_a_plain_archive_is_not_copied(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.tar", CONTENT)
    with Archive.open(path) as archive:
        os.truncate(path, 512)
        with pytest.raises(CorruptCheckpointError):
            archive.members["model_weights/__0_0.distcp"].read(0, 10)


def test_a_member_of_more_bytes_than_octal_digits_can_say_is_found(tmp_path: Path) -> None:
    size = 9 << 30
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        path = tmp_path / f"{number}.tar"
        with path.open("wb") as stream:
            stream.write(member("big", size=size).tobuf(form))
            stream.seek(size, os.SEEK_CUR)
            stream.write(member("last", size=3).tobuf(form) + b"end".ljust(512, b"\0") + bytes(1024))
        with Archive.open(path) as archive:
            assert archive.members["big"].size_bytes == size
            assert archive.members["last"].read(0, 3) == b"end"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "a\\b", "a\nb", ".", "./", "a/./b", "x" * 300])
def test_an_unsafe_name_is_refused(tmp_path: Path, name: str) -> None:
    error = refused(plain(tmp_path / "a.tar", {"fine": b"", name: b"x"}))
    assert isinstance(error, UnsafeContentError)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "character device"),
        (tarfile.BLKTYPE, "block device"),
        (tarfile.FIFOTYPE, "FIFO"),
        (tarfile.CONTTYPE, "contiguous"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
        (b"Q", "unknown kind"),
    ],
)
def test_what_is_no_regular_file_is_refused_by_its_kind(tmp_path: Path, kind: bytes, said: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member("odd", type=kind, linkname="model_config.yaml").tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    error = refused(path)
    assert isinstance(error, UnsafeContentError)
    assert "'odd'" in str(error)
    assert said in str(error)


@pytest.mark.parametrize(
    "names", [("a", "a"), ("./a", "a"), ("a", "b", "././a"), ("a", "a/b"), ("a/b/c", "a/b"), ("a", "a.b", "a/b")]
)
def test_a_name_twice_and_a_file_that_is_a_folder_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = packed(tmp_path / "a.tar", [(member(name), b"x") for name in names])
    assert isinstance(refused(path), UnsafeContentError)


def test_a_folder_of_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    members = [(member("a"), b"x"), (member("a", type=tarfile.DIRTYPE), b"")]
    assert "both a file and a folder" in str(refused(packed(tmp_path / "a.tar", members)))
    assert "both a file and a folder" in str(refused(packed(tmp_path / "b.tar", members[::-1])))


def test_names_that_only_begin_alike_are_read(tmp_path: Path) -> None:
    names = {"a.b": b"", "a": b"", "ab/c": b"", "a b": b"", "ab.c": b""}
    assert listed(plain(tmp_path / "a.tar", names)) == names


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"GNU.sparse.size": "9"}, "GNU.sparse.size"),
        ({"linkpath": "/etc/passwd"}, "linkpath"),
        ({"size": "99999999999999999999"}, "size"),
        ({"size": "-1"}, "size"),
        ({"path": "../x"}, "no safe file name"),
    ],
)
def test_an_extended_header_that_means_mischief_is_refused(tmp_path: Path, headers: dict[str, str], said: str) -> None:
    info = member("a", pax_headers=headers)
    assert said in str(refused(packed(tmp_path / "a.tar", [(info, b"x")])))


def test_a_global_header_may_not_name_members(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:", pax_headers={"path": "model_config.yaml"}) as archive:
        archive.addfile(member("a"))
    assert "'path'" in str(refused(tmp_path / "a.tar"))
    with tarfile.open(tmp_path / "b.tar", "w:", pax_headers={"comment": "made from a commit"}) as archive:
        archive.addfile(member("a"))
    assert listed(tmp_path / "b.tar") == {"a": b""}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_of_many_bytes_is_not_read(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as stream:
        stream.write(member("x", type=kind, size=1 << 40).tobuf(tarfile.GNU_FORMAT))
        stream.truncate(1 << 41)
    assert "claims 1099511627776 bytes" in str(refused(path))


def cut_after_a_member(data: bytes) -> bytes:
    return data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_after_a_member, "cut off"),
        (lambda data: data[:700], "cut off"),
        (lambda data: b"X" + data[1:], "checksum"),
        (lambda data: data + b"x", "behind its end"),
        (lambda data: data + data, "behind its end"),
        (lambda data: data[:124] + b"zzz" + data[127:], "checksum"),
        (lambda data: b"", "cut off"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    path = plain(tmp_path / "a.tar", {"a": b"x" * 100, "b": b"y" * 600}, form=tarfile.USTAR_FORMAT)
    path.write_bytes(damage(path.read_bytes()))
    assert said in str(refused(path))


def test_a_member_that_claims_more_than_the_archive_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member("a", size=1 << 42).tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert "outside of the file" in str(refused(path))


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40], lambda data: data[:-8] + b"\1" * 8])
def test_damaged_compression_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = plain(tmp_path / "a.tar", {"a": os.urandom(5000)}, mode="w:gz")
    path.write_bytes(damage(path.read_bytes()))
    assert "compressed archive is damaged" in str(refused(path))


@pytest.mark.slow
def test_a_decompression_bomb_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.nemo"
    with gzip.open(path, "wb") as stream:
        stream.write(member("zeros", size=200 << 20).tobuf(tarfile.GNU_FORMAT))
        for _ in range(200):
            stream.write(bytes(1 << 20))
    error = refused(path)
    assert isinstance(error, UnsafeContentError)
    assert "decompression bomb" in str(error)


def test_compressed_parts_one_after_the_other_are_one_archive(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.tar", CONTENT)
    data = path.read_bytes()
    path.write_bytes(b"".join(gzip.compress(data[start : start + 700]) for start in range(0, len(data), 700)))
    assert listed(path) == CONTENT


LISTED = """
import os, sys
from holdfast.formats.nemo.archives import Archive
with Archive.open(sys.argv[1]) as archive:
    print(sorted(archive.members), os.listdir(os.environ["TMPDIR"]))
"""


def listed_elsewhere(path: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Open an archive in a process that has its temporary files in another folder."""
    return subprocess.run(
        [sys.executable, "-c", LISTED, path],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
    )


def test_decompression_leaves_no_file_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = listed_elsewhere(plain(tmp_path / "a.tar", {"a": b"x"}, mode="w:gz"), scratch)
    assert done.stdout == "['a'] []\n"
    assert list(scratch.iterdir()) == []


def test_a_compressed_archive_without_room_for_its_content_is_a_storage_error(tmp_path: Path) -> None:
    """On a small tmpfs; where one cannot be mounted, there is nothing to see."""
    room = tmp_path / "room"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", room], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        path = plain(tmp_path / "a.tar", {"a": bytes(4 << 20)}, mode="w:gz")
        done = listed_elsewhere(path, room)
        assert StorageError.__name__ in done.stderr
        assert "bytes that may be used in" in done.stderr
        assert "set TMPDIR" in done.stderr
    finally:
        subprocess.run(["umount", room], check=True)


def test_an_archive_is_recognised_by_its_content(tmp_path: Path) -> None:
    found = {
        "plain": plain(tmp_path / "a", CONTENT),
        "compressed": plain(tmp_path / "b", CONTENT, mode="w:gz"),
        "text": tmp_path / "c",
        "compressed text": tmp_path / "d",
        "zeros": tmp_path / "e",
        "empty": tmp_path / "f",
        "cut": tmp_path / "g",
    }
    found["text"].write_bytes(b"model_config.yaml" * 100)
    found["compressed text"].write_bytes(gzip.compress(b"model_config.yaml" * 100))
    found["zeros"].write_bytes(bytes(1024))
    found["empty"].write_bytes(b"")
    found["cut"].write_bytes(found["compressed"].read_bytes()[:30])
    seen = set()
    for name, path in found.items():
        with BinaryFile.open(path) as file:
            seen |= {name} if is_archive(file) else set()
    assert seen == {"plain", "compressed"}


@pytest.mark.slow
def test_a_flood_of_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as stream:
        for number in range(MAX_MEMBERS + 1):
            stream.write(member(str(number)).tobuf(tarfile.GNU_FORMAT))
        stream.write(bytes(1024))
    assert f"more than {MAX_MEMBERS} members" in str(refused(path))
