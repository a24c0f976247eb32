"""Docstrings and messages of the source are in plain English: a verb or a subject first, and no dialect."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
# A docstring says what the function does: "Return whether ...", "Return the ...".
NO_VERB = re.compile(r"(What|Who|Whose|Whether|The same|It|Its)\b")
DIALECT = re.compile(r"\b(whoever|somebody|tidy up|tidied|of one's own|the dead|behind the training)\b", re.IGNORECASE)
NO_SUBJECT = re.compile(r"it('s)? ", re.IGNORECASE)


def without_verb(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of functions that do not start with a verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if NO_VERB.match(text):
                yield node.lineno, text.splitlines()[0]


def without_subject(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the messages of raised errors that start with "it"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            first = node.exc.args[0]
            part = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and NO_SUBJECT.match(part.value):
                yield node.lineno, part.value


def found_in_source(find: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> list[str]:
    """Return what a search finds in every module, with its place."""
    return [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in find(ast.parse(path.read_text()))
    ]


def test_docstrings_of_functions_start_with_a_verb() -> None:
    assert found_in_source(without_verb) == []


def test_messages_start_with_their_subject() -> None:
    assert found_in_source(without_subject) == []


def test_the_source_has_no_dialect() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DIALECT.search(line)
    ]
    assert wrong == []


def test_what_is_looked_for_is_found() -> None:
    code = '''
def f():
    """Whether it rains."""
    raise ValueError(f"it rains on {f}")

def g():
    """Return whether it rains."""
    raise ValueError("rain")
'''
    assert list(without_verb(ast.parse(code))) == [(2, "Whether it rains.")]
    assert list(without_subject(ast.parse(code))) == [(4, "it rains on ")]
