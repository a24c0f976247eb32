"""Rows in columns look as rich's own table does."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import example, given, settings, strategies as st
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from holdfast.cli.columns import Columns
from tests.counting import calls

NAMES = ("", "step", "created", "reasons")
RIGHT = ("step",)
WORDS = st.sampled_from(["", "*", "500", "12:00:00 UTC", "loss 0.25, acc 0.5", "a-name-that-is-long", "损失 0.5", "é"])
CELLS = st.builds(Text, WORDS, st.sampled_from(["", "bold", "dim"]))
MARKS = st.sampled_from([Text(""), Text("*", "green"), Text("", "green").append_text(Text("!", "bold red"))])
ROWS = st.lists(st.tuples(MARKS, CELLS, CELLS, CELLS), max_size=6)


def by_rich(rows: list[tuple[Text, ...]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in NAMES:
        table.add_column(Text(name), justify="right" if name in RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def by_us(rows: list[tuple[Text, ...]]) -> Columns:
    columns = Columns(*NAMES, right=RIGHT)
    for row in rows:
        columns.add_row(*row)
    return columns


def seen(renderable: object, width: int) -> list[tuple[str, Style | None]]:
    """Each character with its style; that of a space cannot be seen."""
    return [
        (letter, (segment.style or Style.null()) if letter.strip() else None)
        for segment in rendered(renderable, width)
        for letter in segment.text
    ]


def rendered(renderable: Any, width: int) -> list[Segment]:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})
    return list(screen.render(renderable))


@given(rows=ROWS, width=st.integers(24, 120))
@example(rows=[(Text("*"), Text("500"), Text("x" * 300), Text("y " * 200))], width=40)
@example(rows=[(Text(""), Text("9" * 60), Text(""), Text(""))], width=30)
@settings(derandomize=True, deadline=None, max_examples=400)
def test_they_look_as_richs_own_table_does_at_any_width(rows: list[tuple[Text, ...]], width: int) -> None:
    assert seen(by_us(rows), width) == seen(by_rich(rows), width)


def test_they_lose_nothing_where_there_is_hardly_any_room() -> None:
    words = ("*", "12345", "2026-01-01", "keep-me")
    for width in range(8, 24):
        lines = "".join(letter for letter, _ in seen(by_us([tuple(map(Text, words))]), width))
        assert sorted(lines.replace(" ", "").replace("\n", "")) == sorted("".join([*NAMES, *words]))


def test_a_row_takes_a_fraction_of_the_work_that_it_takes_in_richs() -> None:
    row = (Text("*", "green"), Text("500", "bold"), Text("2026-01-01 12:00:00 UTC"), Text("loss 0.25"))
    for width, fraction in ((120, 10), (40, 3)):  # where all fit, and where two columns of each row fold
        ours, richs = (calls(rendered, made([row] * 50), width) for made in (by_us, by_rich))
        assert ours * fraction < richs
