"""Find names in code: identifiers, attributes and texts, but no comments and no docstrings. Used by the tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def uses_of(name: str, root: Path, *, outside: Path) -> list[str]:
    """Return where code under `root`, but not under `outside`, has a name that contains this one."""
    return [
        f"{path.relative_to(root)}:{line}: {found}"
        for path in sorted(root.rglob("*.py"))
        if not path.is_relative_to(outside)
        for line, found in _names_in(ast.parse(path.read_text()))
        if name in found.lower()
    ]


def _names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    # A text that stands alone describes what it stands in or after.
    descriptions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in descriptions:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, ast.unparse(node)
