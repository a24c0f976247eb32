"""How a person names a checkpoint: `latest`, `best`, `best:val_loss`, `500`, a tag, a folder. Text in, value out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import UsageError
from holdfast.records.layout import MAX_STEP, check_step, parse_folder

Kind = Literal["latest", "best", "step", "tag", "folder"]

_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}", re.ASCII)
_METRIC = re.compile(r"[^\s:@][^:@\x00-\x1f]{0,255}")


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. `name` is the metric, the tag or the folder; `step` is set for a step alone."""

    kind: Kind
    name: str = ""
    step: int = 0
    mode: Literal["min", "max"] = "min"

    def __str__(self) -> str:
        if self.kind == "step":
            return str(self.step)
        if self.kind == "best":
            metric = f":{self.name}" if self.name else ""
            explicit = self.mode == "max" or self.name in ("min", "max")
            return f"best{metric}:{self.mode}" if explicit else f"best{metric}"
        return self.name or self.kind

    @property
    def may_fall_back(self) -> bool:
        """Only `latest` asks for "the newest sound one". Everything else was asked for by name."""
        return self.kind == "latest"


def parse_selector(text: str | int) -> Selector:
    """Read a selector, or raise a UsageError that shows what one looks like."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise _unreadable(text)
    if isinstance(text, int):
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
    """Whether a text may be a tag: no word that already means something else as a selector."""
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
    parts = spelled.split(":")
    mode: Literal["min", "max"] = "max" if parts[-1] == "max" else "min"
    names = parts[1:-1] if parts[-1] in ("min", "max") else parts[1:]
    if len(names) > 1 or any(_METRIC.fullmatch(name) is None for name in names):
        raise _unreadable(spelled)
    return Selector("best", name=names[0] if names else "", mode=mode)


def _unreadable(text: object) -> UsageError:
    return UsageError(
        f"{text!r} selects no checkpoint",
        advice="use 'latest', 'best', 'best:METRIC', 'best:METRIC:max', a step such as 500, a tag, or a folder's name",
    )
