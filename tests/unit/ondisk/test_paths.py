"""Names that go out come back the same, one spelling each, and no name leads out of where it starts."""

from __future__ import annotations

import os.path
import re

import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import UnsafeContentError, UsageError
from holdfast.ondisk import paths
from holdfast.storage.keys import key_parts

steady = settings(derandomize=True, deadline=None, max_examples=300)

STEPS = st.integers(0, paths.MAX_STEP)
ATTEMPTS = st.integers(1, 999_999_999)
ESCAPING = (
    "",
    ".",
    "..",
    "../x",
    "x/..",
    "x/../y",
    "./x",
    "x/.",
    "x/./y",
    "/x",
    "//x",
    "x//y",
    "x/",
    "/etc/passwd",
    "..\\x",
    "x\\..\\y",
    "C:\\x",
    "x\0",
    "x\ny",
    "x\x7f",
    "\ud800",
    "x/\udfff",
    ".tmp-0123",
    "x/.tmp-0123",
    "x" * 256,
    "é" * 128,
    "/".join("x" * 100 for _ in range(11)),
)


@given(step=STEPS, attempt=ATTEMPTS)
@example(step=0, attempt=1)
@example(step=999_999_999, attempt=2)
@example(step=paths.MAX_STEP, attempt=999_999_999)
@steady
def test_a_folders_name_gives_back_its_step_and_attempt(step: int, attempt: int) -> None:
    name = paths.folder_name(step, attempt)
    assert paths.parse_folder(name) == (step, attempt)
    assert paths.safe_relative(name) == name
    assert key_parts(name) == (name,)


@given(
    below=st.lists(st.tuples(STEPS, st.integers(1, 999))),
    before=st.tuples(STEPS, st.integers(1, 999)),
    step=STEPS,
    more=st.integers(0, 9),
)
@example(below=[(4, 1)], before=(0, 1), step=4, more=0)
@example(below=[(4, 1), (3, 2)], before=(0, 1), step=4, more=0)
@steady
def test_no_name_below_a_floor_is_one_above_it(
    below: list[tuple[int, int]], before: tuple[int, int], step: int, more: int
) -> None:
    names = [paths.folder_name(*one) for one in below]
    floor = paths.Floor.highest([paths.Floor.of([*names, "run.json", "latest"]), paths.Floor(*before)])
    taken = paths.folder_name(step, floor.first_attempt(step) + more)
    assert taken not in [*names, paths.folder_name(*before)]
    assert (floor.first_attempt(step) == 1) == (step > floor.step)


def test_without_names_the_floor_is_below_every_step() -> None:
    assert paths.Floor.of(["run.json", "step-1", "step-000000001.1"]) == paths.Floor() == (-1, 0)
    assert paths.Floor().first_attempt(0) == 1


@given(one=st.tuples(STEPS, ATTEMPTS), other=st.tuples(STEPS, ATTEMPTS))
@steady
def test_two_attempts_never_share_a_name(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (paths.folder_name(*one) == paths.folder_name(*other)) == (one == other)


@given(
    text=st.text()
    | st.from_regex(r"step-[0-9]{1,20}(\.[0-9]{1,10})?", fullmatch=True)
    | st.from_regex(r"step-[0-9]{9}")
    | st.builds("{}{}".format, st.builds(paths.folder_name, STEPS, ATTEMPTS), st.sampled_from(["\n", " ", ".", "/"]))
)
@example(text="step-000000500.1")
@example(text="step-0000000500")
@example(text="step-500")
@example(text="step-000000500\n")
@example(text="step-\u0660\u0660\u0660\u0660\u0660\u0660\u0665\u0660\u0660")
@example(text="step-9223372036854775808")
@example(text="step-000000500.02")
@steady
def test_a_text_is_a_folders_name_only_if_folder_name_makes_it(text: str) -> None:
    parsed = paths.parse_folder(text)
    if parsed is not None:
        assert paths.folder_name(*parsed) == text
    elif (match := re.fullmatch(r"step-([0-9]{9,19})", text, re.ASCII)) is not None:
        assert len(match[1]) > 9
        assert match[1][0] == "0" or int(match[1]) > paths.MAX_STEP


def hex_or_text(value: object) -> str:
    return hex(value)[:20] if isinstance(value, int) else str(value)


@pytest.mark.parametrize("step", [-1, 2**63, 1 << 20_000, True, 1.0, "1", None], ids=hex_or_text)
def test_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(UsageError):
        paths.folder_name(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_are_counted_from_one(attempt: int) -> None:
    with pytest.raises(UsageError):
        paths.folder_name(1, attempt)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ESCAPING)
def test_a_name_that_could_escape_is_refused(name: str) -> None:
    with pytest.raises(UnsafeContentError):
        paths.safe_relative(name)


PARTS = st.sampled_from(["..", ".", "", "x", "a b", "..x", "x..", "...", "~", "\\", "\0", ".tmp-1"]) | st.text(
    max_size=4
)


@pytest.mark.guarantee("G9")
@given(name=st.lists(PARTS, max_size=5).map("/".join))
@steady
def test_a_name_that_is_let_through_stays_below_where_it_starts(name: str) -> None:
    try:
        paths.safe_relative(name)
    except UnsafeContentError:
        return
    assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
    assert os.path.normpath(f"/root/{name}").startswith("/root/")
    name.encode()
    # What the manifest may name, every storage must be able to look for.
    assert "/".join(key_parts(name)) == name


@given(name=st.from_regex(r"[A-Za-z0-9_.-]{1,40}(/[A-Za-z0-9_.-]{1,40}){0,3}", fullmatch=True))
@example(name="assets/tokenizer/vocab.json")
@example(name="rank-00000.1.safetensors")
@steady
def test_an_ordinary_name_is_let_through(name: str) -> None:
    if not any(part in (".", "..") or part.startswith(".tmp-") for part in name.split("/")):
        assert paths.safe_relative(name) == name


@given(name=st.text(max_size=120))
@example(name="model\n")
@example(name="model.x")
@example(name="loader@rank-00000")
@example(name="é")
@steady
def test_a_component_has_a_plain_name(name: str) -> None:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", name, re.ASCII) is not None
    if plain:
        assert paths.check_component_name(name) == name
    else:
        with pytest.raises(UsageError):
            paths.check_component_name(name)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ([], 0),
        (["assets/rank-00000.7.json", "weights.safetensors", "rank-00000.x.json", "rank-1.9.json"], 0),
        (["shared.json"], 1),
        (["rank-00000.safetensors", "rank-00012.3.safetensors", "rank-00001.2.json"], 4),
        (["shared.9.json", "rank-00000.json"], 10),
    ],
)
def test_the_next_part_is_above_that_of_every_file(names: list[str], part: int) -> None:
    assert paths.next_part(names) == part
    new = [paths.tensor_file(0, part), paths.values_file(0, part), paths.shared_values(part)]
    assert not set(new) & set(names)
