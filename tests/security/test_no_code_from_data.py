"""Nothing in the package can turn bytes into code: no unpickling, no evaluating, no importing by data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
# A tool for tests, which carries results between its own processes; it never sees a checkpoint.
EXEMPT = {"testing/processes.py"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("torch.jit", "load"), ("builtins", "eval")}
# Imports of a name that is not written there, each looked at: names of a table in the code, never of data. But for
# `plugins/class_loading.py`, which imports the class that a program's configuration names; no checkpoint leads there.
KNOWN_IMPORTS = {
    "__init__.py",
    "testing/__init__.py",
    "cli/__init__.py",
    "storage/registry.py",
    "formats/registry.py",
    "plugins/__init__.py",
    "plugins/class_loading.py",
    "integrations/lightning/framework.py",
    "integrations/lightning/last_path.py",
}
# Reads the pickles that Megatron makes of its own objects, with torch's restricted reader alone.
KNOWN_RESTRICTED = {"integrations/megatron.py"}
# Read configurations, and only in the way that makes plain values.
KNOWN_YAML = {"plugins/config_files.py", "formats/nemo/nemo_config.py"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(text: str) -> list[str]:
    """What a module does that could make code of data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").partition(".")[0] in FORBIDDEN_MODULES else []
            found += (
                ["torch.load"] if node.module == "torch" and any(name.name == "load" for name in node.names) else []
            )
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            owner, _, method = name.rpartition(".")
            if name in FORBIDDEN_CALLS or (owner, method) in FORBIDDEN_METHODS:
                found.append(name)
            if method == "import_module" or name == "import_module":
                found += [] if node.args and isinstance(node.args[0], ast.Constant) else ["import_module"]
    return found


MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("module", [module for module in MODULES if module not in EXEMPT])
def test_a_module_makes_no_code_of_data(module: str) -> None:
    found = offences((SOURCE / module).read_text())
    if module in KNOWN_IMPORTS:
        found = [one for one in found if one != "import_module"]
    if module in KNOWN_YAML:
        found = [one for one in found if one != "yaml"]
    if module in KNOWN_RESTRICTED:
        found = [one for one in found if one not in ("pickle", "torch.load")]
    assert found == []


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("module", sorted(KNOWN_RESTRICTED))
def test_a_pickle_of_others_is_read_with_the_restricted_reader_alone(module: str) -> None:
    calls = [node for node in ast.walk(ast.parse((SOURCE / module).read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func) == "torch.load"]
    assert loads
    assert all(
        ("weights_only", "True") in [(one.arg, ast.unparse(one.value)) for one in call.keywords] for call in loads
    )
    assert not [call for call in calls if dotted(call.func).startswith("pickle.")]


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("module", sorted(KNOWN_YAML))
def test_yaml_is_only_read_safely(module: str) -> None:
    tree = ast.parse((SOURCE / module).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and dotted(node.value) == "yaml"}
    plain = {"safe_load", "SafeLoader", "SafeDumper", "dump", "AliasEvent", "YAMLError", "constructor"}
    assert used <= plain


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("tag", ["python/object/apply:os.getpid []", "python/name:os.getpid", "python/module:os"])
def test_a_config_in_yaml_makes_no_objects(tag: str) -> None:
    with pytest.raises(holdfast.UsageError, match="could not determine a constructor"):
        holdfast.CheckpointConfig.from_yaml(f"run: !!{tag}\n")


def test_the_scan_sees_what_it_looks_for() -> None:
    for text in (
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from _pickle import Unpickler",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec(data)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
        "import numpy\nnumpy.load('x')",
        "import yaml",
    ):
        assert offences(text), text
    assert offences("import importlib\nimportlib.import_module('torch')") == []
    assert len(MODULES) > 40
