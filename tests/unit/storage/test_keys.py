"""What is a key and what is not."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.storage.keys import TEMPORARY_PREFIX, folder_parts, is_part, key_parts


def test_a_key_is_taken_apart() -> None:
    assert key_parts("step-000000500/assets/config.yaml") == ("step-000000500", "assets", "config.yaml")
    assert folder_parts("a/b") == ("a", "b")
    assert folder_parts("") == (), "the root"


@pytest.mark.parametrize("part", ["a", "...", "a b", "ä", "-", f"x{TEMPORARY_PREFIX}"])
def test_an_ordinary_name_is_a_part(part: str) -> None:
    assert is_part(part)
    assert key_parts(f"{part}/{part}") == (part, part)


@pytest.mark.parametrize("part", ["", ".", "..", "a\\b", "a\0b", f"{TEMPORARY_PREFIX}1", "\ud800"])
@pytest.mark.parametrize("key", ["{}", "{}/a", "a/{}", "a/{}/b"])
def test_what_is_no_name_is_refused_wherever_it_is(key: str, part: str) -> None:
    assert not is_part(part)
    with pytest.raises(UsageError, match="is no key"):
        key_parts(key.format(part))


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="not bytes"):
        key_parts(b"a")  # type: ignore[arg-type]
