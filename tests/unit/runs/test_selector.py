"""A selector reads as it is written, and a text that is none says so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import UsageError
from holdfast.ondisk import paths
from holdfast.runs.selector import Selector, check_tag, is_tag, parse_selector

steady = settings(derandomize=True, deadline=None, max_examples=400)

METRICS = (
    st.sampled_from(["min", "max", "val_loss", "a b", "loss/val", "ppl.best", "准确率", "latest", "500", "acc@1"])
    | st.lists(st.sampled_from(["val", "loss", "min", "max", ":"]), min_size=1, max_size=5).map(":".join)
    | st.from_regex(r"\S[^\x00-\x1f]{0,20}", fullmatch=True)
)
TAGS = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda text: text not in ("latest", "best") and not text.startswith("step-")
)
WORDS = ("best", "latest", "min", "max", ":", "@", "step-", "0", "9" * 19, ".", " ")
SELECTORS = st.one_of(
    st.just(Selector("latest")),
    st.builds(lambda step: Selector("step", step=step), st.integers(0, paths.MAX_STEP)),
    st.builds(lambda name: Selector("tag", name=name), TAGS),
    st.builds(
        lambda step, attempt: Selector("folder", name=paths.folder_name(step, attempt)),
        st.integers(0, paths.MAX_STEP),
        st.integers(1, 999),
    ),
    st.builds(lambda name, mode: Selector("best", name=name, mode=mode), METRICS, st.sampled_from(["min", "max"])),
    st.builds(lambda mode: Selector("best", mode=mode), st.sampled_from(["min", "max", None])),
)


@given(selector=SELECTORS)
@example(selector=Selector("best", name="min", mode="min"))
@example(selector=Selector("best", name="min", mode="max"))
@example(selector=Selector("best", name="max", mode="min"))
@example(selector=Selector("best", name="max", mode="max"))
@example(selector=Selector("best", name="val:loss", mode="min"))
@example(selector=Selector("best", name="val:max", mode="min"))
@example(selector=Selector("best", name=":", mode="max"))
@example(selector=Selector("best", name="val:loss"))
@steady
def test_a_selector_reads_as_it_is_written(selector: Selector) -> None:
    assert parse_selector(str(selector)) == selector


@given(
    text=st.text(max_size=80)
    | st.lists(st.sampled_from(["best", "latest", "min", "max", ":", "@", "step-", "0", "9" * 19, ".", " "])).map(
        "".join
    )
)
@example(text="")
@example(text="best:")
@example(text="best::")
@example(text="best:a:b:min")
@example(text="best:a@b")
@example(text="9" * 5000)
@example(text="-1")
@example(text="\u0665\u0660\u0660")
@example(text="²")
@example(text="500\n")
@example(text="latest\n")
@example(text="best:loss\n")
@example(text="\ud800")
@steady
def test_any_text_is_a_selector_or_a_usage_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except UsageError:
        return
    assert parse_selector(str(selector)) == selector
    assert not text.endswith("\n") or selector.kind == "best"


@given(number=st.integers())
@example(number=10**5000)
@steady
def test_an_int_is_a_step_or_a_usage_error(number: int) -> None:
    if 0 <= number <= paths.MAX_STEP:
        assert parse_selector(number) == Selector("step", step=number)
    else:
        with pytest.raises(UsageError):
            parse_selector(number)


@pytest.mark.parametrize(
    ("text", "metric", "mode"),
    [
        ("best", "", None),
        ("best:max", "", "max"),
        ("best:max:min", "max", "min"),
        ("best:val:loss", "val:loss", None),
        ("best:val:loss:max", "val:loss", "max"),
        ("best:val:max:min", "val:max", "min"),
        ("best:acc@1:max", "acc@1", "max"),
    ],
)
def test_only_a_last_word_that_says_how_to_rank_is_no_part_of_the_metric(text: str, metric: str, mode: Any) -> None:
    assert parse_selector(text) == Selector("best", name=metric, mode=mode)


@pytest.mark.parametrize("text", ["best:", "best: loss", "best::max", "best:loss\n", "best:max\n", "bestloss:"])
def test_what_names_no_metric_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_selector(text)


@pytest.mark.parametrize("value", [True, False, None, 1.0, b"latest", [], object()])
def test_what_is_neither_text_nor_int_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parse_selector(value)  # type: ignore[arg-type]


@given(text=st.text(max_size=70) | TAGS)
@example(text="best")
@example(text="latest")
@example(text="step-000000500")
@example(text="release\n")
@steady
def test_a_tag_can_always_be_selected_by_its_name(text: str) -> None:
    if is_tag(text):
        assert check_tag(text) == text
        assert parse_selector(text) == Selector("tag", name=text)
    else:
        with pytest.raises(UsageError):
            check_tag(text)


@pytest.mark.guarantee("G11")
@given(selector=SELECTORS)
@steady
def test_only_latest_may_be_answered_with_another_checkpoint(selector: Selector) -> None:
    assert selector.may_fall_back == (selector.kind == "latest")
