"""Names that people read, made from a template, and back. Values enter, a file name leaves; a file name enters, values
leave, exactly those that make this name again. Opens nothing; what is in a record is never taken from a name.

    LinkTemplate("{name}--{val_loss:.3f}-{step}").format({"name": "my-run", "val_loss": 0.25, "step": 100})
    'my-run--0.250-100'

A field is a text with `:s` or is called `name`, a whole number with `:d` or `:09d`, a rounded number with
`:.3f`, `:.3e` or `:.3g`; without any of these it is a number as Python writes it.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping

from holdfast.errors import UnsafeContentError, UsageError
from holdfast.ondisk.paths import LATEST_LINK, MAX_NAME_CHARACTERS, RUN_KEY, safe_relative

__all__ = ["LinkTemplate", "Value"]

Value = int | float | str

_TAKEN = (LATEST_LINK, "best", RUN_KEY)
_TAKEN_FRONTS = ("best-", "step-")
# The one text that every run has. Were a field without a spec any text, 'my-run-100' would have two readings.
_TEXT_FIELD = "name"
# Metrics are called val/loss or acc@1 too. A dot or a bracket would look like access to a part of the value.
_FIELD_NAME = re.compile(r"[^\W\d][^\s.\[\]{}!:\x00-\x1f\x7f]*")
_SPEC = re.compile(r"|s|d|0[1-9][0-9]?d|\.[0-9]{1,2}[efg]", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTemplate:
    """A template for names. What it cannot name and read back without doubt is a UsageError, not a guess."""

    template: str
    _head: str = dataclasses.field(init=False, repr=False, compare=False)
    _fields: tuple[_Field, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        head, fields = _taken_apart(self.template)
        object.__setattr__(self, "_head", head)
        object.__setattr__(self, "_fields", fields)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the values that it needs, from left to right."""
        return tuple(field.name for field in self._fields)

    def format(self, values: Mapping[str, Value]) -> str:
        """Return the name for these values; others may be among them. It is always one that `parse` can read."""
        text = self._head + "".join(field.write(_value_of(field, values)) + field.after for field in self._fields)
        if not _is_free(text):
            raise UsageError(
                f"the template {self.template!r} makes {text[:300]!r}, which cannot be the name of a link",
                advice="a name has at most 255 bytes, no '/', backslash or control character; 'latest', 'best', "
                "'run.json' and names that start with 'best-' or 'step-' are taken",
            )
        self._only_reading(text)
        return text

    def parse(self, text: str) -> dict[str, Value] | None:
        """Return the values of which `format` makes exactly this text; None when it makes no such text from any."""
        return self._only_reading(text) if _is_free(text) else None

    def _only_reading(self, text: str) -> dict[str, Value] | None:
        readings = _readings(text, self._head, self._fields)
        if len(readings) > 1:
            one, other = (", ".join(f"{name}={value!r}" for name, value in reading.items()) for reading in readings)
            raise UsageError(
                f"{text!r} has several readings by the template {self.template!r}: {one}; or {other}",
                advice="say what a field is, such as {step:d}, and separate texts by what they do not contain",
            )
        return readings[0] if readings else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field, and the literal text behind it."""

    name: str
    spec: str
    after: str

    @property
    def is_text(self) -> bool:
        return self.spec == "s" or (not self.spec and self.name == _TEXT_FIELD)

    def write(self, value: Value) -> str:
        if self.is_text:
            return _written_text(self.name, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(
                f"'{self.name}' is of type {type(value).__name__}, not a number",
                advice=f"write {{{self.name}:s}} if it is a text",
            )
        if self.spec.endswith("d") and not isinstance(value, int):
            raise UsageError(
                f"'{self.name}' is {value!r}, not an int", advice="pass an int, or write a spec such as .3f"
            )
        try:
            return self._written(value)
        except (OverflowError, ValueError):
            # Python writes no int of thousands of digits, and makes no float of a large one.
            raise UsageError(f"'{self.name}' is too large a number for a name") from None

    def read(self, text: str) -> Value | None:
        """Return the value that is written like this, or None. No other spelling of it counts."""
        if self.is_text:
            return text if _is_text(text) else None
        for kind in self._kinds():
            try:
                value = kind(text)
            except ValueError:
                continue
            if self._written(value) == text:
                return value
        return None

    def _kinds(self) -> tuple[type[int] | type[float], ...]:
        if not self.spec:
            return (int, float)
        return (int,) if self.spec.endswith("d") else (float,)

    def _written(self, value: int | float) -> str:
        # Types that derive from these, such as numpy's, write themselves in another way.
        plain = int(value) if isinstance(value, int) else float(value)
        return format(plain, self.spec) if self.spec else repr(plain)


def _taken_apart(template: object) -> tuple[str, tuple[_Field, ...]]:
    """Return the literal text in front, and the fields."""
    if not isinstance(template, str):
        raise UsageError(f"a template is a text, not of type {type(template).__name__}")
    if len(template) > MAX_NAME_CHARACTERS:
        raise _unusable(template, f"it has more than {MAX_NAME_CHARACTERS} characters")
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _unusable(template, str(error)) from None
    head = ""
    fields: list[_Field] = []
    for literal, name, spec, conversion in pieces:
        if fields:
            fields[-1] = dataclasses.replace(fields[-1], after=fields[-1].after + literal)
        else:
            head += literal
        if name is not None:
            fields.append(_Field(name, _checked_spec(template, name, spec or "", conversion), ""))
    _check_fields(template, fields)
    _check_literals(template, head, [field.after for field in fields])
    return head, tuple(fields)


def _checked_spec(template: str, name: str, spec: str, conversion: str | None) -> str:
    if conversion:
        raise _unusable(template, f"'{name}' has the conversion !{conversion}")
    if _FIELD_NAME.fullmatch(name) is None:
        raise _unusable(template, f"{name!r} is no plain name of a value")
    if _SPEC.fullmatch(spec) is None:
        raise _unusable(template, f"'{name}' has the format {spec!r}")
    return spec


def _check_fields(template: str, fields: list[_Field]) -> None:
    names = [field.name for field in fields]
    if not names:
        raise _unusable(template, "it has no field, so that all would have one name")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _unusable(template, f"'{twice}' is in it twice")
    for field, following in itertools.pairwise(fields):
        if not field.after:
            raise _unusable(template, f"nothing separates '{field.name}' from '{following.name}'")


def _check_literals(template: str, head: str, others: Iterable[str]) -> None:
    for literal in (head, *others):
        if not _is_part(f"x{literal}x"):
            raise _unusable(template, f"{literal[:100]!r} cannot be in the name of a link")
    if head.startswith(_TAKEN_FRONTS):
        raise _unusable(template, "names that start with 'best-' or 'step-' are taken")


def _unusable(template: str, problem: str) -> UsageError:
    return UsageError(
        f"the template {template!r:.300}: {problem}",
        advice="write fields such as {name}, {step}, {step:09d}, {val_loss:.3f} (also e and g) or {label:s}, with text "
        "between them",
    )


def _value_of(field: _Field, values: Mapping[str, Value]) -> Value:
    if field.name in values:
        return values[field.name]
    nearest = difflib.get_close_matches(field.name, list(values), n=1)
    present = ", ".join(sorted(values)[:10]) or "none"
    raise UsageError(
        f"the template needs '{field.name}', and there is no such value",
        advice=f"did you mean '{nearest[0]}'?" if nearest else f"the values are {present}",
    )


def _written_text(name: str, value: Value) -> str:
    if not isinstance(value, str):
        raise UsageError(
            f"'{name}' is of type {type(value).__name__}, not a text", advice=f"pass a text, or write {{{name}:d}}"
        )
    if not _is_text(value):
        raise UsageError(
            f"'{name}' is {value[:100]!r}, which cannot be in the name of a link",
            advice="a text in a name is not empty, neither starts nor ends with '-', and has no '/'",
        )
    return value


def _is_text(text: str) -> bool:
    # A '-' at the end of a text could as well be the sign of the number behind it.
    return bool(text) and "/" not in text and not text.startswith("-") and not text.endswith("-")


def _is_part(text: str) -> bool:
    try:
        return "/" not in safe_relative(text)
    except UnsafeContentError:
        return False


def _is_free(text: str) -> bool:
    return _is_part(text) and text not in _TAKEN and not text.startswith(_TAKEN_FRONTS)


def _readings(text: str, head: str, fields: tuple[_Field, ...]) -> list[dict[str, Value]]:
    """Return every way to read a text, up to two: with two it is known that there is not one."""
    # The ways to read the rest of the text, by where it starts; from the last field to the first, so that the work
    # grows with the length of the text and not with the number of ways.
    rest: dict[int, list[dict[str, Value]]] = {len(text): [{}]}
    for field in reversed(fields):
        rest = {start: found for start in range(len(text)) if (found := _continued(text, start, field, rest))}
    return rest.get(len(head), []) if text.startswith(head) else []


def _continued(
    text: str, start: int, field: _Field, rest: Mapping[int, list[dict[str, Value]]]
) -> list[dict[str, Value]]:
    found: list[dict[str, Value]] = []
    for end in _ends(text, start, field.after):
        following = rest.get(end + len(field.after))
        value = field.read(text[start:end]) if following else None
        if following and value is not None:
            found += [{field.name: value, **others} for others in following]
        if len(found) > 1:
            break
    return found[:2]


def _ends(text: str, start: int, after: str) -> Iterator[int]:
    """Return where a field that starts here can end: in front of each place where the literal behind it is."""
    end = text.find(after, start + 1)
    while end >= 0:
        yield end
        end = text.find(after, end + 1)
