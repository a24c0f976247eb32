"""What a verification found: every damage, named. Values only."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One damage: the file, the leaf that it lies in, the byte range in the file, and what is wrong with it."""

    file: str
    what: str
    leaf: str | None = None
    byte_range: tuple[int, int] | None = None

    def __str__(self) -> str:
        place = self.file
        if self.byte_range is not None:
            place += f", bytes {self.byte_range[0]}-{self.byte_range[1]}"
        if self.leaf is not None:
            place += f", leaf '{self.leaf}'"
        return f"{place}: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a verification."""

    path: str
    step: int
    depth: str
    problems: tuple[Problem, ...]
    checked_bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.problems)} problems"
        return f"Report({state}, step={self.step}, checked_bytes={self.checked_bytes}, depth={self.depth!r})"
