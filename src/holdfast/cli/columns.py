"""Rows in columns, and many lines: texts enter, renderables leave that look as rich's own do. Knows no checkpoints.

Rich's takes seconds for thousands of rows, nearly all of them on cells that fit where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from holdfast.cli.output import visible

__all__ = ["Columns", "Lines"]

_GAP = 2


class Columns:
    """Rows below the names of their columns. Where they are too wide, the widest columns fold rather than lose text."""

    def __init__(self, *names: str, right: Sequence[str] = ()) -> None:
        self.rows: list[tuple[Text, ...]] = []
        self._heads = tuple(Text(name, "bold") for name in names)
        self._right = [name in right for name in names]

    def add_row(self, *cells: Text) -> None:
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(self._heads, *self.rows, strict=True)
        gaps = [_GAP] * (len(self._heads) - 1) + [0]
        widths = [max(_length(cell.plain) for cell in column) + gap for column, gap in zip(columns, gaps, strict=True)]
        places = list(zip(_fitted(widths, options.max_width), gaps, self._right, strict=True))
        yield from _rendered(console, self._heads, places, at_bottom=True)
        for row in self.rows:
            yield from _rendered(console, row, places)


class Lines:
    """Lines of plain text, of which rich makes one print: one print for each line looks up the terminal each time."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield Segment(visible(line))
            yield Segment.line()


# How wide a column is, how much of that is the gap behind it, and whether its texts stand at the right.
_Place = tuple[int, int, bool]


def _fitted(widths: Iterable[int], room: int) -> list[int]:
    """Widths that have room: the widest give, as evenly as it goes."""
    fitted = [max(min(width, room), 1) for width in widths]
    while (excess := sum(fitted) - room) > 0 and any(fitted):
        widest = max(fitted)
        most = widest - max((width for width in fitted if width != widest), default=0)
        giving = [index for index, width in enumerate(fitted) if width == widest]
        left = excess
        for number, index in enumerate(giving):
            taken = min(excess, most, round(left / (len(giving) - number)))
            fitted[index] -= taken
            left -= taken
    return fitted


def _rendered(
    console: Console, row: Sequence[Text], places: Sequence[_Place], *, at_bottom: bool = False
) -> Iterator[Segment]:
    """Return a row's segments, as many lines as its highest cell has."""
    cells = [_lines(console, cell, *place) for cell, place in zip(row, places, strict=True)]
    height = max(map(len, cells))
    for number in range(height):
        for lines, (width, _, _) in zip(cells, places, strict=True):
            own = number - (height - len(lines)) if at_bottom else number
            yield from lines[own] if 0 <= own < len(lines) else (Segment(" " * width),)
        yield Segment.line()


def _lines(console: Console, cell: Text, width: int, gap: int, right: bool) -> list[list[Segment]]:
    # In a column with hardly any room the text comes before the gap.
    gap = min(gap, max(width - 1, 0))
    inner = max(width - gap, 1)
    spare = inner - _length(cell.plain)
    if spare < 0:
        folded = cell.wrap(console, inner, justify="right" if right else "left", overflow="fold")
        return [[*_styled(console, line), Segment(" " * gap)] for line in folded]
    before, after = " " * (spare if right else 0), " " * (gap if right else spare + gap)
    if not cell.style and not cell.spans:
        return [[Segment(f"{before}{cell.plain}{after}")]]
    return [[Segment(before), *_styled(console, cell), Segment(after)]]


def _length(text: str) -> int:
    # Nearly all are ASCII, of which each letter takes one place; rich looks each letter up.
    return len(text) if text.isascii() else cell_len(text)


def _styled(console: Console, text: Text) -> Iterable[Segment]:
    # Without spans rich renders a text in no style at all.
    return text.render(console) if text.spans else (Segment(text.plain, console.get_style(text.style)),)
