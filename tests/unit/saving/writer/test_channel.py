"""Messages arrive whole and in order, with their handles, until the other side is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.saving.writer.channel import Channel


class Message(msgspec.Struct):
    number: int
    text: str = ""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end, Message) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def never() -> bool:
    return False


def test_messages_of_any_size_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    messages = [Message(number, "x" * size) for number, size in enumerate([0, 1, 3 << 20, 0, 1 << 20])]
    sending = threading.Thread(target=lambda: [ends[0].send(message) for message in messages])
    sending.start()
    assert [ends[1].receive(never) for _ in messages] == messages
    sending.join()


def test_each_end_sends_and_receives(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(Message(1))
    ends[1].send(Message(2))
    assert ends[1].receive(never) == Message(1)
    assert ends[0].receive(never) == Message(2)


def test_handles_arrive_in_the_order_of_their_messages(ends: tuple[Channel, Channel]) -> None:
    pipes = [os.pipe() for _ in range(2)]
    for number, (_, writing) in enumerate(pipes):
        ends[0].send(Message(number), writing)
        os.close(writing)
    assert [ends[1].receive(never) for _ in pipes] == [Message(0), Message(1)]
    for number, (reading, _) in enumerate(pipes):
        handle = ends[1].take_handle()
        assert not os.get_inheritable(handle)
        os.write(handle, b"%d" % number)
        os.close(handle)
        assert os.read(reading, 10) == b"%d" % number
        os.close(reading)


def test_what_was_sent_before_the_other_side_closed_still_arrives(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(Message(1))
    ends[0].close()
    assert ends[1].receive(never) == Message(1)
    assert ends[1].receive(never) is None
    with pytest.raises(OSError, match=r"Broken pipe|Bad file descriptor"):
        ends[1].send(Message(2))


def test_a_side_that_is_gone_with_its_end_still_open_is_noticed(ends: tuple[Channel, Channel]) -> None:
    answers = iter([False, True])
    assert ends[1].receive(lambda: next(answers)) is None
    assert next(answers, "asked twice") == "asked twice"


def test_a_message_that_was_cut_off_is_none(ends: tuple[Channel, Channel]) -> None:
    left, right = socket.socketpair()
    left.sendall(b"\xff\0\0\0\0\0\0\0{")
    left.close()
    receiving = Channel(right, Message)
    assert receiving.receive(never) is None
    receiving.close()


def test_handles_that_nobody_took_are_closed_with_the_channel(ends: tuple[Channel, Channel]) -> None:
    reading, writing = os.pipe()
    ends[0].send(Message(1), writing)
    os.close(writing)
    assert ends[1].receive(never) == Message(1)
    ends[1].close()
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b"", "nobody holds the other end"
    os.close(reading)
