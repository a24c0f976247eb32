"""The `model_config.yaml` of a NeMo archive. YAML enters, plain values leave, and back; opens nothing.

The text may come from a stranger. Only plain values are made of it. Aliases are refused: with them a text of a few
lines stands for any number of values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UsageError
from holdfast.formats.plain_text import require_plain_text

__all__ = ["MAX_CONFIG_BYTES", "config_from_yaml", "config_to_yaml", "with_references"]

MAX_CONFIG_BYTES = 2 << 20
REFERENCE = "nemo:"
"""What stands before the name of a file of the archive where the config refers to it."""

_TAG = "tag:yaml.org,2002:"
# YAML 1.1 takes 1e-4 for a text, because it has no point; NeMo, as everybody, for a number.
_SHORT_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
_MAX_PATH_CHARACTERS = 4096


def config_from_yaml(text: bytes, *, file: str) -> Any:
    """Return the values of a config. `file` is where it is from, for messages."""
    yaml = _yaml("reading the config of a NeMo archive")
    if len(text) > MAX_CONFIG_BYTES:
        raise UnsafeContentError(f"the config has {len(text)} bytes; {MAX_CONFIG_BYTES} are accepted", file=file)
    try:
        values = _loader_class()(text.decode()).get_single_data()
        require_plain_text(values)
        return values
    except yaml.constructor.ConstructorError as error:
        if "could not determine a constructor" in str(error.problem):
            raise UnsafeContentError(
                f"the config asks for more than plain values: {error.problem}", file=file
            ) from None
        raise CorruptCheckpointError(f"the config is no valid YAML: {error.problem}", file=file) from None
    except RecursionError:
        raise UnsafeContentError("the config is nested too deeply", file=file) from None
    except HoldfastError as error:
        raise error.at(file=file) from None
    except (yaml.YAMLError, ValueError, ArithmeticError, TypeError, LookupError) as error:
        raise CorruptCheckpointError(f"the config is no valid YAML: {str(error)[:200]}", file=file) from None


def config_to_yaml(config: Any) -> bytes:
    """Return a config as YAML, the same for the same values."""
    yaml = _yaml("writing the config of a NeMo archive")
    try:
        text: str = yaml.dump(
            config, Dumper=_dumper_class(), sort_keys=False, allow_unicode=True, default_flow_style=False
        )
        return text.encode()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the config cannot be written as YAML: {str(error)[:200]}", advice="give plain values as config="
        ) from None


def with_references(config: Any, find: Callable[[str], str | None]) -> Any:
    """Return a config in which each text that is the path of a file of the archive refers to it.

    `find` gets a path, or the name in a reference that is there already, and returns the name in the archive.
    """
    if isinstance(config, Mapping):
        return {key: with_references(value, find) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [with_references(value, find) for value in config]
    if not isinstance(config, str) or not config or len(config) > _MAX_PATH_CHARACTERS or "\n" in config:
        return config
    is_reference = config.startswith(REFERENCE)
    # A single word may be anything: "tokenizer" is hardly ever the file of that name.
    name = find(config.removeprefix(REFERENCE)) if is_reference or "/" in config or "." in config[1:-1] else None
    if name is not None:
        return f"{REFERENCE}{name}"
    if is_reference:
        raise UsageError(
            f"the config refers to '{config}', and there is no such asset",
            advice="store the file with assets=, or take the reference out of the config",
        )
    return config


def _yaml(doing: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(f"{doing} needs PyYAML", advice="pip install 'holdfast[nemo]'") from None
    return yaml


@functools.cache
def _loader_class() -> Any:
    """Return YAML's safe loader without aliases and dates, and with numbers as NeMo reads them.

    The loader is that in Python: the one in C is known to end the process at deep nesting.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise UnsafeContentError("the config has an alias, which can stand for any number of values")
            return super().compose_node(parent, index)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag != f"{_TAG}timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(f"{_TAG}float", _SHORT_FLOAT, list("-+0123456789"))
    return Loader


@functools.cache
def _dumper_class() -> Any:
    """Return YAML's safe dumper, without aliases, that quotes texts which NeMo would read as numbers."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(f"{_TAG}str", text, style="'" if _SHORT_FLOAT.match(text) else None)

    Dumper.add_representer(str, represent)
    return Dumper
