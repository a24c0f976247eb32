"""The bar: when it is drawn, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import io
import threading

import pytest

from holdfast.runs.progress import Progress

GIB = 1 << 30


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def screen(self) -> str:
        """What a person sees on the line now."""
        shown = ""
        for line in self.getvalue().split("\r"):
            shown = line + shown[len(line) :]
        return shown.rstrip()

    def drawings(self) -> int:
        return self.getvalue().count("\r")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_nothing_is_drawn_in_the_first_two_seconds() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving step 500", GIB, stream=terminal, clock=clock) as progress:
        for _ in range(19):
            clock.now += 0.1
            progress.add(1 << 20)
    assert terminal.getvalue() == ""


def test_the_line_says_what_how_far_how_fast_and_how_long() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving step 500", 8 * GIB, stream=terminal, clock=clock) as progress:
        clock.now += 4
        progress.add(2 * GIB)
        assert terminal.screen() == "saving step 500 [####------------] 2.00 of 8.00 GiB, 0.50 GiB/s, 12 s left"
        clock.now += 4
        progress.set(6 * GIB)
        assert terminal.screen().startswith("saving step 500 [############----] 6.00 of 8.00 GiB, 0.75 GiB/s")


def test_the_line_is_clear_at_the_end() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving", GIB, stream=terminal, clock=clock) as progress:
        clock.now += 3
        progress.add(GIB)
        assert terminal.screen() != ""
    assert terminal.screen() == ""
    progress.add(1)
    assert terminal.screen() == "", "and stays so"


def test_a_shorter_line_leaves_no_rest_of_a_longer_one() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("a", 100 * GIB, stream=terminal, clock=clock) as progress:
        clock.now += 3
        progress.set(GIB)
        clock.now += 1
        progress.set(99 * GIB)
        assert terminal.screen().endswith("0 s left")


def test_it_is_drawn_at_most_ten_times_a_second() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving", GIB, stream=terminal, clock=clock) as progress:
        clock.now += 2
        for _ in range(1000):
            clock.now += 0.001
            progress.add(1)
        assert 9 <= terminal.drawings() <= 11


def test_nothing_is_drawn_where_there_is_no_terminal_or_it_is_not_wanted() -> None:
    for stream, shown in ((Terminal(is_terminal=False), True), (Terminal(), False)):
        clock = Clock()
        with Progress("saving", GIB, stream=stream, clock=clock, shown=shown) as progress:
            clock.now += 10
            progress.add(GIB)
        assert stream.getvalue() == ""


def test_a_terminal_that_is_gone_stops_nobody() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving", GIB, stream=terminal, clock=clock) as progress:
        clock.now += 3
        progress.add(1)
        terminal.close()
        clock.now += 1
        progress.add(1)
    assert terminal.closed


def test_more_than_was_announced_and_nothing_at_all_are_drawn_too() -> None:
    for total, done in ((0, 0), (0, 5), (10, 20), (10, 0)):
        terminal, clock = Terminal(), Clock()
        with Progress("saving", total, stream=terminal, clock=clock) as progress:
            clock.now += 3
            progress.set(done)
            assert "[" in terminal.screen()


def test_threads_may_count_at_once() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("saving", 8000 * 2**20, stream=terminal, clock=clock) as progress:
        threads = [threading.Thread(target=lambda: [progress.add(2**20) for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.now += 3
        progress.add(0)
        assert "7.81 of 7.81 GiB" in terminal.screen()


def test_a_line_never_reaches_the_end_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal, clock = Terminal(), Clock()
    with Progress("saving step 500", GIB, stream=terminal, clock=clock) as progress:
        clock.now += 3
        progress.add(1)
        assert len(terminal.screen()) == 29


@pytest.mark.parametrize("module", ["ipykernel.iostream", "google.colab._stream"])
def test_a_notebook_gets_no_bar_though_its_stream_calls_itself_a_terminal(module: str) -> None:
    stream, clock = type("OutStream", (Terminal,), {"__module__": module})(), Clock()
    with Progress("saving", GIB, stream=stream, clock=clock) as progress:
        clock.now += 3
        progress.add(1)
    assert stream.getvalue() == ""
