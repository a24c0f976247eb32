"""A name is made from values and read back to the same ones, or refused: no name has a reading that is only likely."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import UsageError
from holdfast.ondisk.paths import folder_name, safe_relative
from holdfast.runs.link_names import LinkTemplate

steady = settings(derandomize=True, deadline=None, max_examples=150)

PLAIN = LinkTemplate("{name}--{val_loss:.3f}-{step}-{consumed_samples}")
NEMO = LinkTemplate("{name}--val_loss={val_loss:.3f}-step={step}-consumed_samples={consumed_samples}")
NEMO_LAST = LinkTemplate(NEMO.template + "-last")


def label(value: object) -> str:
    # Python refuses to write a number of thousands of digits.
    return "huge" if isinstance(value, int) and value.bit_length() > 512 else f"{value!r:.30}"


def outcome(act: Callable[[], Any]) -> Any:
    """What it returns, or the words with which it refuses."""
    try:
        return act()
    except UsageError as error:
        return error


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        (PLAIN, {"name": "gpt", "val_loss": 0.25, "step": 100, "consumed_samples": 800}, "gpt--0.250-100-800"),
        (PLAIN, {"name": "my-run--x", "val_loss": -0.5, "step": 1, "consumed_samples": 0}, "my-run--x---0.500-1-0"),
        (PLAIN, {"name": "a", "val_loss": math.nan, "step": -1, "consumed_samples": -2}, "a--nan--1--2"),
        (PLAIN, {"name": "a", "val_loss": -math.inf, "step": 1, "consumed_samples": 800.0}, "a---inf-1-800.0"),
        (
            NEMO,
            {"name": "megatron_gpt", "val_loss": 2.345, "step": 100, "consumed_samples": 800},
            "megatron_gpt--val_loss=2.345-step=100-consumed_samples=800",
        ),
        (
            NEMO_LAST,
            {"name": "megatron_gpt", "val_loss": 2.345, "step": 100, "consumed_samples": 800},
            "megatron_gpt--val_loss=2.345-step=100-consumed_samples=800-last",
        ),
        (LinkTemplate("{val_loss:.3f}-{step}"), {"val_loss": -0.5, "step": -7}, "-0.500--7"),
        (LinkTemplate("{name}-{step}"), {"name": "my-run-2", "step": 100}, "my-run-2-100"),
        (LinkTemplate("{step:09d}"), {"step": 500}, "000000500"),
        (LinkTemplate("{step:05d}"), {"step": -5}, "-0005"),
        (LinkTemplate("{lr:.2e}_{ppl:.3g}"), {"lr": 1e-5, "ppl": 12300.0}, "1.00e-05_1.23e+04"),
        (LinkTemplate("{lr}"), {"lr": 1e-5}, "1e-05"),
        (LinkTemplate("{lr}"), {"lr": 2**63 + 1}, "9223372036854775809"),
        (LinkTemplate("{val/loss:.2f}@{label:s}"), {"val/loss": 1.5, "label": "7"}, "1.50@7"),
        (LinkTemplate("{{{step}}}"), {"step": 5}, "{5}"),
        (LinkTemplate("{准确率:.2f}x{acc@1}"), {"准确率": 0.5, "acc@1": 1.0}, "0.50x1.0"),
        (LinkTemplate("run-{step:d}.of.{name}"), {"step": 3, "name": "a.b c"}, "run-3.of.a.b c"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_is_read_as_it_is_written(template: LinkTemplate, values: dict[str, Any], text: str) -> None:
    assert template.format({**values, "other": "x"}) == text
    parsed = template.parse(text)
    assert parsed is not None
    assert list(parsed) == list(values) == list(template.fields)
    assert all(same(parsed[name], value) for name, value in values.items())


def test_a_template_is_a_value() -> None:
    assert eval(repr(PLAIN), {"LinkTemplate": LinkTemplate}) == PLAIN
    assert len({PLAIN, LinkTemplate(PLAIN.template), NEMO}) == 2


def test_a_rounded_number_is_read_as_it_was_rounded() -> None:
    assert LinkTemplate("{loss:.3f}").parse(LinkTemplate("{loss:.3f}").format({"loss": 0.12345})) == {"loss": 0.123}
    assert LinkTemplate("{loss:.3f}").parse(LinkTemplate("{loss:.3f}").format({"loss": 1})) == {"loss": 1.0}


def test_a_number_that_derives_from_a_plain_one_is_written_as_that() -> None:
    assert LinkTemplate("{loss}").format({"loss": numpy.float64(0.5)}) == "0.5"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN.template, text)
        for text in (
            "",
            "gpt",
            "gpt--0.250-100",
            "gpt--0.250-100-800-last",
            "x/gpt--0.250-100-800",
            "gpt--0.25-100-800",
            "gpt--0.2500-100-800",
            "gpt--00.250-100-800",
            "gpt--+0.250-100-800",
            "gpt--0.250-0100-800",
            "gpt--0.250-1_0-800",
            "gpt--0.250-100-800 ",
            "gpt--0.250-100-800\n",
            "gpt--0.250-100-٨",
            "--0.250-100-800",
            "-gpt--0.250-100-800",
            "gpt--NaN-100-800",
            "gpt--infinity-100-800",
            "gpt--0.250--0-800",
            "step-1--0.250-100-800",
            "best-1--0.250-100-800",
            "gpt--0.250-100-" + "9" * 300,
            "..",
            "\ud800--0.250-100-800",
        )
    ]
    + [
        ("{name}-{step:09d}", folder_name(500)),
        ("{name}", "latest"),
        ("{name}", "best"),
        ("{name}", "run.json"),
        ("x{step:d}", "5"),
        ("x{step:d}", "y5"),
        ("x{step:d}", "x5.0"),
        ("{lr:.2e}", "1e-05"),
        ("{lr}", "1e-5"),
        ("{lr}", "1.50"),
        ("{lr}", "text"),
        ("{loss:.3f}", "123456789012345678901234.123"),
    ],
    ids=label,
)
def test_what_no_values_make_is_no_name(template: str, text: str) -> None:
    assert LinkTemplate(template).parse(text) is None


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{name}-{label:s}", "a-b-c"),
        ("{name}-{lr}", "run-1e-10"),
        ("{step}5{tokens}", "15551"),
        ("{name}--{label:s}--{step}", "a--b--c--5"),
        ("{name}-{label:s}", "a" + "-a" * 120),
    ],
)
def test_a_name_with_several_readings_is_refused(template: str, text: str) -> None:
    with pytest.raises(UsageError, match="has several readings by the template") as caught:
        LinkTemplate(template).parse(text)
    assert "{step:d}" in caught.value.advice


def test_a_name_that_would_have_several_readings_is_not_made() -> None:
    with pytest.raises(
        UsageError, match=r"'a-b-c' has several readings .*: name='a', label='b-c'; or name='a-b', label="
    ):
        LinkTemplate("{name}-{label:s}").format({"name": "a-b", "label": "c"})
    assert LinkTemplate("{name}-{label:s}").format({"name": "a", "label": "c"}) == "a-c"
    with pytest.raises(UsageError, match="several readings"):
        LinkTemplate("{name}-{step}").format({"name": "run-1e", "step": 10})
    assert LinkTemplate("{name}-{step:d}").format({"name": "run-1e", "step": 10}) == "run-1e-10"


def test_a_hard_name_takes_no_longer_than_an_easy_one() -> None:
    # Each field may end at each '-': tried one by one that is more ways than there is time for.
    template = LinkTemplate("-".join(f"{{text{number}:s}}" for number in range(30)) + "!")
    assert template.parse("a" + "-a" * 120) is None
    assert template.parse("a" + "-a" * 29 + "!") is not None


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("", "it has no field"),
        ("release", "it has no field"),
        ("{{name}}", "it has no field"),
        ("{name}{step}", "nothing separates 'name' from 'step'"),
        ("{step}-{step}", "'step' is in it twice"),
        ("{step!r}", "'step' has the conversion !r"),
        ("{step!s:s}", "'step' has the conversion !s"),
        ("{}", "'' is no plain name"),
        ("{0}", "'0' is no plain name"),
        ("{ step }", "' step ' is no plain name"),
        ("{a.b}", "'a.b' is no plain name"),
        ("{a[0]}", "'a[0]' is no plain name"),
        ("{a[b]}", "'a[b]' is no plain name"),
        ("{name.__class__}", "is no plain name"),
        ("{step:{width}d}", "'step' has the format '{width}d'"),
        *((f"{{step:{spec}}}", f"'step' has the format '{spec}'") for spec in ("5d", "x", ">5", "0d", "+d", "100d")),
        *((f"{{loss:{spec}}}", f"'loss' has the format '{spec}'") for spec in ("f", ".f", "5.3f", ".3", "%", ".100f")),
        *((f"{{loss:{spec}}}", f"'loss' has the format '{spec}'") for spec in (".3d", "e", "g", ",", "s ", "09.3f")),
        ("{", "Single '{'"),
        ("}", "Single '}'"),
        ("{step", "expected '}'"),
        ("a/{step}", "'a/' cannot be in the name"),
        ("{step}/", "'/' cannot be in the name"),
        ("{step}\\", "cannot be in the name"),
        ("\x00{step}", "cannot be in the name"),
        ("{step}\n", "cannot be in the name"),
        ("{step}\ud800", "cannot be in the name"),
        ("x" * 254 + "{step}", "cannot be in the name"),
        ("step-{step}", "'best-' or 'step-' are taken"),
        ("best-{step}", "'best-' or 'step-' are taken"),
        ("{step}" + "x" * 2000, "more than 1024 characters"),
    ],
    ids=label,
)
def test_a_template_that_cannot_be_used_is_refused_at_once(template: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        LinkTemplate(template)
    assert problem in caught.value.problem
    assert "{val_loss:.3f}" in caught.value.advice


@pytest.mark.parametrize(
    "template", [None, 5, b"{step}", ["{step}"], 10**5000], ids=["None", "5", "bytes", "list", "huge"]
)
def test_a_template_is_a_text(template: Any) -> None:
    with pytest.raises(UsageError, match="a template is a text, not of type"):
        LinkTemplate(template)


def test_a_value_that_is_missing_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="needs 'val_loss', and there is no such value; did you mean 'val_los'"):
        LinkTemplate("{val_loss:.3f}").format({"val_los": 0.5, "step": 5})
    with pytest.raises(UsageError, match="the values are a, b"):
        LinkTemplate("{val_loss:.3f}").format({"b": 0.5, "a": 5})
    with pytest.raises(UsageError, match="the values are none"):
        LinkTemplate("{val_loss:.3f}").format({})


@pytest.mark.parametrize(
    ("template", "value", "problem"),
    [
        ("{x:d}", 5.0, "'x' is 5.0, not an int"),
        ("{x:09d}", math.nan, "'x' is nan, not an int"),
        ("{x:d}", True, "'x' is of type bool, not a number"),
        ("{x}", "text", "'x' is of type str, not a number; write {x:s} if it is a text"),
        ("{x:.3f}", "0.5", "'x' is of type str, not a number"),
        ("{x}", None, "'x' is of type NoneType, not a number"),
        ("{x:s}", 5, "'x' is of type int, not a text; pass a text, or write {x:d}"),
        ("{x:s}", 10**5000, "'x' is of type int, not a text"),
        ("{x:s}", "", "cannot be in the name of a link"),
        ("{x:s}", "a/b", "cannot be in the name of a link"),
        ("{x:s}", "-a", "neither starts nor ends with '-'"),
        ("{x:s}", "a-", "neither starts nor ends with '-'"),
        ("{x:d}", 10**5000, "too large a number for a name"),
        ("{x:.3f}", 10**400, "too large a number for a name"),
        ("{x}", 10**300, "cannot be the name of a link"),
        ("{x:s}", "a\\b", "cannot be the name of a link"),
        ("{x:s}", "a\nb", "cannot be the name of a link"),
        ("{x:s}", "\ud800", "cannot be the name of a link"),
        ("{x:s}", "..", "cannot be the name of a link"),
        ("{x:s}", ".tmp-1", "cannot be the name of a link"),
        ("{x:s}", "ü" * 128, "cannot be the name of a link"),
        ("{x:s}", "latest", "'best', 'run.json' and names that start"),
        ("{x:s}", "best", "cannot be the name of a link"),
        ("{x:s}", "run.json", "cannot be the name of a link"),
        ("{x:s}", "step-5", "cannot be the name of a link"),
        ("{x:s}", "best-loss", "cannot be the name of a link"),
        ("step{x:d}", -5, "cannot be the name of a link"),
    ],
    ids=label,
)
def test_a_value_that_cannot_be_in_a_name_is_refused(template: str, value: Any, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        LinkTemplate(template).format({"x": value})
    assert problem in str(caught.value)


NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "": st.floats() | st.integers(-(2**70), 2**70),
    "d": st.integers(-(2**70), 2**70),
    "09d": st.integers(-(2**40), 2**40),
    ".0f": st.floats(-1e20, 1e20) | st.integers(-(2**70), 2**70),
    ".3f": st.floats(-1e20, 1e20) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 2.0**53 + 2]),
    ".0e": st.floats(),
    ".15e": st.floats(),
    ".40e": st.floats(),
    ".3g": st.floats() | st.integers(-(2**70), 2**70),
    ".16g": st.floats(),
    "s": st.text("ab-15.en_", min_size=1, max_size=8),
}
FIELDS = st.lists(
    st.sampled_from(sorted(NUMBERS)).flatmap(lambda spec: st.tuples(st.just(spec), NUMBERS[spec])),
    min_size=1,
    max_size=4,
)
LITERALS = st.text("-_=x5.e@", min_size=1, max_size=3)


@given(fields=FIELDS, data=st.data())
@steady
def test_whatever_is_written_is_read_back(fields: list[tuple[str, Any]], data: st.DataObject) -> None:
    literals = data.draw(st.lists(LITERALS, min_size=len(fields) + 1, max_size=len(fields) + 1))
    pieces = [f"{{f{number}:{spec}}}" for number, (spec, _) in enumerate(fields)]
    template = LinkTemplate("t" + "".join(itertools.chain(*zip(literals, pieces, strict=False))) + literals[-1])
    values = {f"f{number}": value for number, (_, value) in enumerate(fields)}
    text = outcome(lambda: template.format(values))
    if isinstance(text, UsageError):
        allowed = ("several readings", "neither starts nor ends", "cannot be the name")
        assert any(part in str(text) for part in allowed)
        return
    assert "/" not in safe_relative(text)
    parsed = template.parse(text)
    assert parsed is not None
    assert template.format(parsed) == text
    for number, (spec, value) in enumerate(fields):
        read = parsed[f"f{number}"]
        if spec in ("", "d", "09d", "s"):
            assert same(read, value)
        else:
            assert isinstance(read, float)
            assert format(read, spec) == format(value, spec)


PIECES = ("run", "a", "-", "--", "1", "10", "0.250", "-0.5", "nan", "-inf", "1e-05", "1e", "2.500", "00", "x-y")


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=5),
    template=st.sampled_from([PLAIN, LinkTemplate("{name}-{step}"), LinkTemplate("{loss:.3f}-{lr}")]),
)
@example(pieces=["run", "-1-", "-5"], template=LinkTemplate("{name}-{step}"))
@example(pieces=["-1-5"], template=LinkTemplate("{name}-{step}"))
@steady
def test_whatever_is_read_makes_the_same_name_again(pieces: list[str], template: LinkTemplate) -> None:
    text = "-".join(pieces)
    parsed = outcome(lambda: template.parse(text))
    if parsed is None:
        return
    if isinstance(parsed, UsageError):
        assert "several readings" in str(parsed)
    else:
        assert template.format(parsed) == text


@given(text=st.text(max_size=300) | st.text("-5.a", max_size=40))
@steady
def test_any_text_is_read_or_is_none_or_is_refused(text: str) -> None:
    for template in (PLAIN, NEMO, LinkTemplate("{step}"), LinkTemplate("{name}"), LinkTemplate("{name}-{step}")):
        parsed = outcome(lambda template=template: template.parse(text))
        if isinstance(parsed, UsageError):
            assert "several readings" in str(parsed)
        else:
            assert parsed is None or template.format(parsed) == text


@given(first=st.text("ab-", min_size=1, max_size=6), second=st.text("ab-", min_size=1, max_size=6))
@steady
def test_readings_are_counted_as_trying_every_cut_counts_them(first: str, second: str) -> None:
    template, text = LinkTemplate("{name}-{label:s}"), f"{first}-{second}"
    cuts = [
        (text[:place], text[place + 1 :])
        for place in range(len(text))
        if text[place] == "-"
        and all(
            part and not part.startswith("-") and not part.endswith("-") for part in (text[:place], text[place + 1 :])
        )
    ]
    if len(cuts) > 1:
        with pytest.raises(UsageError, match="several readings"):
            template.parse(text)
    else:
        expected = {"name": cuts[0][0], "label": cuts[0][1]} if cuts else None
        assert template.parse(text) == expected
