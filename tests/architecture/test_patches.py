"""No test replaces a part of the package: a door is wrapped, an argument is passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.patches import patches

TESTS = Path(__file__).parents[1]

EXEMPT = {
    # They break the package on purpose, one guarantee at a time, to see that the model of a run's life notices.
    "crash/test_life_of_a_run.py",
    # The device and its compiler are chosen by size and by what is installed; the test runs each case on one machine.
    "gpu/test_cuda_read.py",
}


def test_no_test_sets_an_attribute_of_the_package() -> None:
    found = {
        str(path.relative_to(TESTS)): patches(path)
        for path in sorted(TESTS.rglob("*.py"))
        if str(path.relative_to(TESTS)) not in EXEMPT
    }
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_what_is_exempt_needs_to_be() -> None:
    assert [name for name in sorted(EXEMPT) if not patches(TESTS / name)] == []


# The check itself


@pytest.mark.parametrize(
    "call",
    [
        "monkeypatch.setattr(cleanup, 'records_of', None)",
        "monkeypatch.setattr(renamed, 'x', 1)",
        "monkeypatch.setattr(Catalog, 'add', None)",
        "monkeypatch.setattr(Catalog.add, '__code__', None)",
        "monkeypatch.setattr(holdfast.errors, 'HoldfastError', None)",
        "monkeypatch.setattr('holdfast.runs.cleanup.records_of', None)",
        "monkeypatch.delattr(cleanup, 'records_of')",
        "setattr(Catalog, 'add', None)",
        "mock.patch('holdfast.runs.cleanup.records_of')",
        "mock.patch.object(Catalog, 'add')",
        "cleanup.records_of = None",
        "Catalog.add = None",
    ],
)
def test_a_patch_is_found(call: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import holdfast\n"
        "from holdfast.runs import cleanup\n"
        "from holdfast.runs import catalog as renamed\n"
        "from holdfast.runs.catalog import Catalog\n"
        f"def test_it(monkeypatch):\n    {call}\n"
    )
    assert patches(file) == [f"test_it.py:6: {call}"]


@pytest.mark.parametrize(
    "call",
    [
        "monkeypatch.setenv('HOLDFAST_MODE', 'sync')",
        "monkeypatch.chdir('holdfast')",
        "monkeypatch.setattr(sys, 'path', [])",
        "monkeypatch.setitem(sys.modules, 'yaml', None)",
        "setattr(values, 'name', 1)",
        "values.name = holdfast",
    ],
)
def test_the_surroundings_may_be_changed(call: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"import sys\nimport holdfast\ndef test_it(monkeypatch, values):\n    {call}\n")
    assert patches(file) == []
