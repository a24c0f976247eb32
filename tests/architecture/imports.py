"""Read who imports whom from the source, without importing it. Used by the tests beside it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"


@dataclass(frozen=True)
class Import:
    """One import of a module by another. `at_start`: it runs when the importing module is loaded."""

    importer: str
    imported: str
    line: int
    at_start: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def read_imports(root: Path = SOURCE) -> list[Import]:
    """Return every import of one module of a package by another; those for type checkers alone are left out."""
    modules = {_module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    return [found for name, path in modules.items() for found in _imports_of(name, path, modules.keys(), root.name)]


def module_names(root: Path = SOURCE) -> list[str]:
    return [_module_name(path, root) for path in sorted(root.rglob("*.py"))]


def entry_of(module: str) -> str:
    """Return the top-level entry that a module belongs to; empty for the package itself."""
    return [*module.split("."), ""][1]


def out_of_order(imports: Sequence[Import], tiers: Sequence[Set[str]], *, sideways: bool = False) -> list[str]:
    """Return the imports that do not go from a tier to a lower one. `sideways` allows those within a tier."""
    place = {entry: number for number, tier in enumerate(tiers) for entry in tier}
    wrong = []
    for found in imports:
        importer, imported = entry_of(found.importer), entry_of(found.imported)
        if importer == imported or importer in ("", "__main__") or imported == "":
            continue
        if importer not in place or imported not in place:
            wrong.append(f"{found}: '{importer if importer not in place else imported}' is in no tier")
        elif place[imported] < place[importer] or (place[imported] == place[importer] and not sideways):
            wrong.append(str(found))
    return wrong


def cycles(imports: Sequence[Import]) -> list[str]:
    """Return one cycle for each module that reaches itself by imports that run when a module is loaded."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        if found.at_start:
            graph.setdefault(found.importer, set()).add(found.imported)
    found_cycles: list[str] = []
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found_cycles.append(" -> ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, [*way, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found_cycles


def code_in_packages(root: Path = SOURCE, *, exempt: Set[str] = frozenset()) -> list[str]:
    """Return the statements of `__init__` files that do more than describe the package and import names from it."""
    wrong = []
    for path in sorted(root.rglob("__init__.py")):
        name = _module_name(path, root)
        for statement in ast.parse(path.read_text()).body if name not in exempt else ():
            names_only = isinstance(statement, ast.Import | ast.ImportFrom) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            )
            is_list = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
            if not names_only and not is_list:
                wrong.append(f"{name}:{statement.lineno}: {ast.unparse(statement).splitlines()[0]}")
    return wrong


def torch_users(modules: Sequence[str], path: Path | None = None) -> list[str]:
    """Return the first of these modules after whose import, in a new process, torch is loaded; none if it never is."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(print(name))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(path)} if path is not None else None
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.split()


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports_of(name: str, path: Path, known: Set[str] | Mapping[str, Path], package: str) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    at_start = _loaded_at_start(tree)
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        for imported in _named_by(node, known, package):
            if imported != name:
                yield Import(name, imported, node.lineno, id(node) in at_start)


def _loaded_at_start(tree: ast.Module) -> set[int]:
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    return {id(node) for node in ast.walk(tree)} - inside


def _named_by(node: ast.AST, known: Set[str] | Mapping[str, Path], package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in known else node.module
