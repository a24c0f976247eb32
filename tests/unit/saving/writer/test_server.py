"""What a writer answers to its commands, over a channel as the trainer's, against a storage in memory."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.ondisk.manifest import BLOCK_BYTES, UserMetadata
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.staging.arena import Arena
from holdfast.saving.training_lineage import Ancestry
from holdfast.saving.writer.channel import Channel
from holdfast.saving.writer.messages import (
    Command,
    Commit,
    Committed,
    Discard,
    Discarded,
    Failed,
    Image,
    Job,
    Layout,
    NewArena,
    PlainImage,
    Reply,
    Shutdown,
    Written,
)
from holdfast.saving.writer.server import serve
from holdfast.testing import MemoryStorage

FOLDER = "step-000000001"


class Talk:
    """The trainer's end of a channel to a writer in a thread."""

    def __init__(self, storage: MemoryStorage | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.storage = storage or MemoryStorage()
        self.channel = Channel(ours, Reply)
        other = Channel(theirs, Command)
        self.thread = threading.Thread(
            target=lambda: serve(other, lambda url: self.storage, lambda: False), daemon=True
        )
        self.thread.start()

    def ask(self, command: Any, handle: int | None = None) -> Any:
        self.channel.send(command, handle)
        return self.channel.receive(lambda: not self.thread.is_alive())


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.channel.close()
    made.thread.join(60)
    assert not made.thread.is_alive(), "it ends with its channel"


def job(*, rank: int = 0, size: int = 1, plain: tuple[PlainImage, ...] = ()) -> Job:
    facts = Facts(
        step=1,
        folder=FOLDER,
        metadata=UserMetadata(),
        ancestry=Ancestry(),
        meshes=(),
        versions={},
        block_bytes=BLOCK_BYTES,
    )
    return Job(1, "token", 1, "memory", FOLDER, 1, rank, size, plain, facts if rank == 0 else None, 60.0, True)


def hand_over(talk: Talk) -> Arena:
    """An arena with one file of a hundred bytes, and an empty layout."""
    arena = Arena.make(1 << 20)
    arena.begin()
    arena.memory[:100] = bytes(range(100))
    talk.channel.send(NewArena(arena.size_bytes), arena.handle)
    talk.channel.send(Layout(1, tuple[Image, ...](), Listing((), ())))
    return arena


def test_commands_that_make_no_sense_get_a_reply_and_the_next_one_is_handled(talk: Talk) -> None:
    nothing = talk.ask(Commit(7))
    assert isinstance(nothing, Failed)
    assert nothing.number == 7
    assert "nothing to commit" in str(nothing.error)
    untold = talk.ask(job())
    assert isinstance(untold, Failed)
    assert "has no layout or no arena" in str(untold.error)
    assert talk.ask(Discard(8)) == Discarded(8)


def test_a_writer_ends_after_a_shutdown(talk: Talk) -> None:
    talk.channel.send(Shutdown())
    talk.thread.join(60)
    assert not talk.thread.is_alive()


def test_what_is_given_up_is_removed(talk: Talk) -> None:
    arena = hand_over(talk)
    assert talk.ask(job(plain=(PlainImage("values.json", 0, 100),))) == Written(1, 100)
    assert talk.storage.read(f"{FOLDER}/values.json", 1000) == bytes(range(100))
    assert talk.ask(Discard(1)) == Discarded(1)
    assert not talk.storage.entries(FOLDER)
    arena.close()


def test_a_command_about_another_save_changes_nothing(talk: Talk) -> None:
    arena = hand_over(talk)
    assert talk.ask(job(plain=(PlainImage("values.json", 0, 100),))) == Written(1, 100)
    other = talk.ask(Commit(9))
    assert isinstance(other, Failed)
    assert other.number == 9
    assert talk.ask(Discard(9)) == Discarded(9)
    assert talk.storage.read(f"{FOLDER}/values.json", 1000) == bytes(range(100))
    assert isinstance(talk.ask(Commit(1)), Committed)
    arena.close()


def test_a_commit_that_does_not_wait_fails_at_once_where_a_part_is_missing(talk: Talk) -> None:
    arena = hand_over(talk)
    assert talk.ask(job(size=2, plain=(PlainImage("values.json", 0, 100),))) == Written(1, 100)
    begin = time.monotonic()
    reply = talk.ask(Commit(1, waits=False))
    assert isinstance(reply, Failed)
    assert "of 2 ranks' parts these are missing" in str(reply.error)
    assert not reply.sealed, "nobody can count on it"
    assert time.monotonic() - begin < 50, "the job would have let it wait for 60 s"
    assert not talk.storage.entries(FOLDER)
    arena.close()


class MomentaryErrors(MemoryStorage):
    """A storage on which the next few listings and reads of an attempt's folder fail, as a file server's do that was
    just restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def entries(self, folder: str) -> Any:
        self._fail("entries", folder)
        return super().entries(folder)

    def read(self, key: str, limit_bytes: int) -> bytes:
        self._fail("read", key)
        return super().read(key, limit_bytes)

    def _fail(self, call: str, key: str) -> None:
        if self.failures and self.failures[0] == call and key.startswith(FOLDER):
            self.failures.pop(0)
            raise StorageError("Stale file handle [ESTALE]", errno=errno.ESTALE, file=key)


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("failures", [["entries"], ["entries"] * 3, ["read"], ["entries", "read", "read"]], ids=str)
def test_a_momentary_error_while_the_receipts_are_read_costs_no_save(failures: list[str], waits: bool) -> None:
    storage = MomentaryErrors()
    leader, follower = Talk(storage), Talk(storage)
    arenas = [hand_over(leader), hand_over(follower)]
    assert leader.ask(job(size=2, plain=(PlainImage("values.json", 0, 100),))) == Written(1, 100)
    assert follower.ask(job(rank=1, size=2, plain=(PlainImage("rank-00001.json", 0, 100),))) == Written(1, 100)
    storage.failures = failures.copy()
    assert isinstance(leader.ask(Commit(1, waits=waits)), Committed)
    assert storage.failures == []
    for talk, arena in zip((leader, follower), arenas, strict=True):
        talk.channel.close()
        talk.thread.join(60)
        arena.close()


def test_an_error_that_does_not_pass_ends_the_wait_for_receipts_with_that_error() -> None:
    storage = MomentaryErrors()
    leader = Talk(storage)
    arena = hand_over(leader)
    assert leader.ask(job(size=2, plain=(PlainImage("values.json", 0, 100),))) == Written(1, 100)
    storage.failures = ["entries"] * 1000
    reply = leader.ask(Commit(1, waits=False))
    assert isinstance(reply, Failed)
    assert "ESTALE" in str(reply.error)
    storage.failures = []
    leader.channel.close()
    leader.thread.join(60)
    arena.close()
