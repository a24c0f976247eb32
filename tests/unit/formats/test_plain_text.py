"""Text that no file can hold and values that nest without end are refused, by every reader and writer of them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UsageError
from holdfast.formats.exporting.metadata_files import write_json
from holdfast.formats.hub.folder import parse_json
from holdfast.formats.nemo.nemo_config import config_from_yaml, config_to_yaml
from holdfast.formats.plain_text import require_plain_text
from holdfast.formats.registry import open_source
from holdfast.ondisk.dtypes import element_type
from holdfast.ondisk.safetensors import encode_header

HALF = "a\ud800b"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_hundred_levels_are_taken_and_one_more_is_not() -> None:
    require_plain_text(nested(100))
    with pytest.raises(UnsafeContentError, match="100 levels"):
        require_plain_text(nested(101))


def test_json_and_yaml_that_nest_without_end_are_refused_when_they_are_read() -> None:
    text = b'{"model_type": "x", "a": ' + b"[" * 150 + b"]" * 150 + b"}"
    for read in (lambda: parse_json(text, "config.json"), lambda: config_from_yaml(text, file="config.yaml")):
        with pytest.raises(UnsafeContentError, match="deep"):
            read()


def test_half_of_a_surrogate_pair_in_json_or_yaml_is_refused_when_it_is_read() -> None:
    text = json.dumps({"model_type": HALF}).encode()
    for read in (lambda: parse_json(text, "config.json"), lambda: config_from_yaml(text, file="config.yaml")):
        with pytest.raises(CorruptCheckpointError, match="surrogate"):
            read()


@pytest.mark.parametrize("value", [HALF, nested(5000)], ids=["half", "deep"])
def test_json_that_cannot_be_written_is_a_usage_error(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match="written as JSON"):
        write_json(tmp_path / "config.json", {"a": value})


def test_a_number_of_thousands_of_digits_in_yaml_is_a_usage_error_when_it_is_written() -> None:
    with pytest.raises(UsageError, match="YAML"):
        config_to_yaml({"a": int("f" * 5000, 16)})


@pytest.mark.parametrize("state", [{HALF: torch.ones(1)}, {"model": {"w": torch.ones(1)}, "b": {HALF: 5}}])
def test_a_name_in_a_torch_file_that_is_no_text_is_refused_when_it_is_opened(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpointError, match="surrogate") as caught:
        open_source(tmp_path / "model.pt")
    assert caught.value.file == str(tmp_path / "model.pt")


@pytest.mark.parametrize("path", [("a",) * 900, ("model", HALF)], ids=["deep", "half"])
def test_a_path_in_a_dcp_folder_that_is_too_deep_or_no_text_is_refused(tmp_path: Path, path: tuple[str, ...]) -> None:
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["w"] = path
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(HoldfastError, match=r"parts|surrogate"):
        open_source(tmp_path / "dcp")


def test_a_header_with_a_name_that_is_no_text_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no text"):
        encode_header([(HALF, element_type("float32"), (1,))], {})
