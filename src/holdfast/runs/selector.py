"""Selectors: how a person names a checkpoint: `latest`, `best`, `best:val_loss`, `500`, a tag, a folder. Text in, value
out.

A metric is named as it was saved: everything after `best:` is its name, except for a `:min` or `:max` at the end, which
states how to rank. One whose own name ends so is named with it: `best:val:max:min`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import UsageError
from holdfast.ondisk.manifest import RankingMode
from holdfast.ondisk.paths import MAX_STEP, as_integer, check_step, parse_folder

Kind = Literal["latest", "best", "step", "tag", "folder"]

_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}", re.ASCII)
_METRIC = re.compile(r"\S[^\x00-\x1f]{0,255}")
_MODE = re.compile(r":(min|max)\Z")


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. `name` is the metric, the tag or the folder; `step` is set for a step alone. Without a `mode`
    a metric ranks as the run states."""

    kind: Kind
    name: str = ""
    step: int = 0
    mode: RankingMode | None = None

    def __str__(self) -> str:
        if self.kind == "step":
            return str(self.step)
        if self.kind == "best":
            metric = f":{self.name}" if self.name else ""
            return f"best{metric}:{self.mode}" if self.mode else f"best{metric}"
        return self.name or self.kind

    @property
    def may_fall_back(self) -> bool:
        """Return whether an older checkpoint may be used instead. Only `latest` means "the newest sound one"."""
        return self.kind == "latest"


def parse_selector(text: str | int) -> Selector:
    """Return a selector; raise a UsageError that shows what one looks like."""
    if not isinstance(text, str):
        if as_integer(text) is None:
            raise _unreadable(text)
        return Selector("step", step=check_step(text))
    spelled = text
    if spelled == "latest":
        return Selector("latest")
    if spelled == "best" or spelled.startswith("best:"):
        return _parse_best(spelled)
    if spelled.isascii() and spelled.isdigit() and len(spelled) <= 19 and int(spelled) <= MAX_STEP:
        return Selector("step", step=int(spelled))
    if parse_folder(spelled) is not None:
        return Selector("folder", name=spelled)
    if is_tag(spelled):
        return Selector("tag", name=spelled)
    raise _unreadable(text)


def is_tag(text: str) -> bool:
    """Return whether a text may be a tag: it must not mean something else as a selector."""
    return _TAG.fullmatch(text) is not None and text not in ("latest", "best") and not text.startswith("step-")


def check_tag(text: object) -> str:
    if not isinstance(text, str) or not is_tag(text):
        raise UsageError(
            f"{text!r} cannot be a tag",
            advice="use letters, digits, '.', '_' and '-', starting with a letter, at most 64 characters; "
            "'latest', 'best' and names that start with 'step-' are taken",
        )
    return text


def _parse_best(spelled: str) -> Selector:
    metric = _MODE.sub("", spelled.removeprefix("best"))
    if metric and _METRIC.fullmatch(metric[1:]) is None:
        raise _unreadable(spelled)
    mode = _MODE.search(spelled)
    return Selector("best", name=metric[1:], mode=_as_mode(mode[1]) if mode else None)


def _as_mode(word: str) -> RankingMode:
    return "max" if word == "max" else "min"


def _unreadable(text: object) -> UsageError:
    return UsageError(
        f"{text!r} selects no checkpoint",
        advice="use 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step such as 500, a tag, or a folder's name",
    )
