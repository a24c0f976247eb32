"""Read a configuration file: YAML or TOML enters, plain data leaves. Nothing in a file is executed."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import KeyMissingError, StorageError, UsageError

__all__ = ["TOML_SUFFIXES", "YAML_SUFFIXES", "is_path", "parse_toml", "parse_yaml", "read_text"]

YAML_SUFFIXES = (".yaml", ".yml")
TOML_SUFFIXES = (".toml",)
_YAML_TAG = "tag:yaml.org,2002:"


def is_path(text: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether a text is the path of a file with one of these suffixes, and not the content of one."""
    return "\n" not in text and ": " not in text and text.endswith(suffixes)


def read_text(file: str) -> str:
    """Return the text of a file."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeyMissingError("the config file does not exist", file=file, advice="check the path") from None
    except OSError as error:
        raise StorageError.of(error, "reading the config", file=file) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the file is no text in UTF-8: {error}", file=file) from None


def parse_toml(text: str) -> Any:
    """Return the plain data of a text in TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"the config is no TOML: {error}") from None


def parse_yaml(text: str) -> Any:
    """Return the plain data of a text in YAML. Needs PyYAML."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("reading a config from YAML needs PyYAML; pip install pyyaml, or write it in TOML") from None
    try:
        loader = _loader_class()(text)
        document = loader.get_single_node()
        _refuse_repeated_keys(document)
        data = None if document is None else loader.construct_document(document)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"the config is no YAML: {error}") from None
    return {} if data is None else data


@functools.cache
def _loader_class() -> Any:
    """Return YAML's safe loader, without its numbers of the base 60: 3:50 is the text that stands there."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def construct_number(loader: Any, node: Any) -> Any:
        if ":" in node.value:
            return loader.construct_yaml_str(node)
        return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)

    for name in ("int", "float"):
        Loader.add_constructor(_YAML_TAG + name, construct_number)
    return Loader


def _refuse_repeated_keys(document: Any) -> None:
    """Refuse a key that stands twice in one mapping, of which YAML's loader takes the last without a word."""
    for mapping in _yaml_mappings(document):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            # A mapping may merge in several others, each by a key <<.
            if key.id != "scalar" or key.tag == _YAML_TAG + "merge":
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise UsageError(
                    f"'{key.value:.80}' stands in line {lines[key.tag, key.value]} and again in line {line}",
                    advice="keep one of them",
                )
            lines[key.tag, key.value] = line


def _yaml_mappings(document: Any) -> Iterator[Any]:
    """Yield all mappings of a document, each once. An alias is the node that it stands for, and may contain itself."""
    seen: set[int] = set()
    rest = [document]
    while rest:
        node = rest.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        if node.id == "mapping":
            yield node
        rest += node.value if node.id == "sequence" else [inner for pair in node.value for inner in pair]
