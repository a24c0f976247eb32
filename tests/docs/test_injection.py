"""What docs/plugins.md says of the config, the contexts and the protocol is what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from holdfast.plugins import policy_data, protocol

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()


def rows(after: str) -> list[str]:
    """The first column of the table that follows a text."""
    table = re.search(r"(?:^\|.*\n)+", PAGE.partition(after)[2], flags=re.MULTILINE)
    assert table is not None
    return re.findall(r"^\| `([\w]+)", table[0], flags=re.MULTILINE)


def test_the_page_has_every_key_of_the_config() -> None:
    assert rows("with the nearest one.") == [field.name for field in dataclasses.fields(protocol.CheckpointConfig)]
    assert rows("Under `save`") == list(policy_data.SAVE_KEYS)
    assert rows("Under `keep`") == list(policy_data.KEEP_KEYS)


def test_the_page_has_every_method_of_the_protocol() -> None:
    methods = [name for name in vars(protocol.CheckpointManagerProtocol) if name in protocol.CALLS]
    assert rows("## The protocol") == methods == list(protocol.CALLS)


@pytest.mark.parametrize("context", [protocol.SaveContext, protocol.LoadContext])
def test_the_page_has_every_field_of_a_context(context: type) -> None:
    missing = [field.name for field in dataclasses.fields(context) if f"`{field.name}`" not in PAGE]
    assert missing == []
    assert rows("`LoadContext` has") == [field.name for field in dataclasses.fields(protocol.LoadContext)]
