"""Measure modules, functions and classes from the source, without importing it. Used by the tests beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Size(NamedTuple):
    """Something and how large it is: a module or a function in lines, a class in methods."""

    kind: str
    place: str
    count: int

    def __str__(self) -> str:
        return f"{self.place}: a {self.kind} of {self.count}"


def sizes(root: Path) -> Iterator[Size]:
    """Yield the size of everything under a folder. A function's lines are those of what is inside it, too."""
    for path in sorted(root.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        yield Size("module", name, len(text.splitlines()))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Size("function", f"{name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                yield Size("class", f"{name}:{node.lineno} {node.name}", len({method.name for method in methods}))


def too_large(root: Path, limits: dict[str, int]) -> list[str]:
    """Return what is larger than the limit of its kind."""
    return [str(size) for size in sizes(root) if size.count > limits[size.kind]]
