"""Each guarantee rests on protections: with one of them taken out of the package, a test of that guarantee fails.

The rows are those of the last section of docs/guarantees.md. `make test` checks that what is taken out is there, and
that its test claims the guarantee; `make deep` takes it out and sees the test fail.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
GUARANTEES = ROOT / "docs" / "guarantees.md"


class Row(NamedTuple):
    """What is taken out: in `file` of the package, `old` becomes `new`. `test`: a file and a function that fails then,
    with what follows in brackets where one of its cases is enough."""

    guarantee: str
    taken_out: str
    file: str
    old: str
    new: str
    test: str

    @property
    def function(self) -> str:
        return self.test.partition("::")[2].partition("[")[0]


ROWS = [
    Row(
        "G1",
        "the sync of the names of a rank's files",
        "saving/write.py",
        "        storage.sync(place)\n",
        "        pass\n",
        "tests/crash/test_crash_points.py::test_a_power_cut_at_any_call_loses_nothing_that_was_committed[1]",
    ),
    Row(
        "G2",
        "the comparison of replicas before the first save of a structure",
        "saving/coordinator.py",
        "        return self._stop_for(differing) if differing else self._start(request, ())",
        "        return self._start(request, ())",
        "tests/distributed/test_replicas.py::"
        "test_a_drifted_replica_is_an_error_that_names_leaf_and_ranks_until_it_is_mended",
    ),
    Row(
        "G3",
        "the comparison of a block with its digest",
        "storage/blocks.py",
        "if blake3(memory[low - offset : high - offset]).hexdigest() != region.digests[index]:",
        "if False:",
        "tests/security/test_hostile_checkpoints.py::test_a_flipped_bit_is_named_by_file_leaf_and_byte_range",
    ),
    Row(
        "G4",
        "the shield of a tag",
        "runs/retention.py",
        "(*policy.parts(), KeepTagged())",
        "policy.parts()",
        "tests/behaviour/test_life_in_one_process.py::test_a_tagged_checkpoint_stays_until_the_tag_is_taken_back",
    ),
    Row(
        "G5",
        "the comparison of what the ranks call",
        "ranks/messages.py",
        "        if message.label != label:",
        "        if False:",
        "tests/unit/ranks/test_store.py::test_ranks_that_call_different_things_are_told_so_at_once",
    ),
    Row(
        "G6",
        "to take a manifest back whose folder cannot be synced",
        "runs/catalog.py",
        "            _withdraw(self.storage, manifest.folder, error)\n            raise",
        "            raise",
        "tests/crash/test_after_the_manifest.py::"
        "test_a_save_that_was_reported_as_failed_is_not_brought_back_by_a_power_cut[sync]",
    ),
    Row(
        "G6",
        "the look at the files before the manifest is written",
        "saving/commit.py",
        "    _require_files(facts, receipts, catalog)\n",
        "",
        "tests/behaviour/test_life_in_one_process.py::"
        "test_a_save_whose_files_were_removed_by_hand_fails_and_costs_no_checkpoint",
    ),
    Row(
        "G7",
        "to judge the shapes before anything changes",
        "loading/verdict.py",
        "    if mismatched or (strategy.strict and (missing or unexpected)):",
        "    if strategy.strict and (missing or unexpected):",
        "tests/unit/manager/test_manager.py::test_a_mismatch_is_an_error_before_anything_changes",
    ),
    Row(
        "G8",
        "the random state of a restore",
        "loading/pipeline.py",
        "        if not self._request.defer_rng:\n            restore",
        "        if False:\n            restore",
        "tests/distributed/test_exact_resume.py::test_one_process_resumes_exactly",
    ),
    Row(
        "G9",
        "the look at the names of files in a manifest",
        "ondisk/manifest.py",
        "        paths.safe_relative(file.name)\n",
        "",
        "tests/security/test_hostile_checkpoints.py::test_a_manifest_that_names_a_file_outside_is_refused_as_unsafe",
    ),
    Row(
        "G10",
        "to ask an optimizer for its state without a step",
        "state/optimizers.py",
        "    packed = optimizer.state_dict()\n",
        "    optimizer.step()\n    packed = optimizer.state_dict()\n",
        "tests/unit/manager/test_manager.py::test_saving_changes_nothing_of_the_callers",
    ),
    Row(
        "G11",
        "the error for a run whose checkpoints are all damaged",
        "loading/resolve.py",
        "if not sound and (scan.damaged or found_damaged):",
        "if False:",
        "tests/unit/manager/test_manager.py::test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh",
    ),
    Row(
        "G12",
        "the look at the number of the format",
        "ondisk/manifest.py",
        "if envelope.holdfast_format > FORMAT:",
        "if False:",
        "tests/unit/manager/test_manager.py::test_a_newer_format_is_refused_by_name",
    ),
    Row(
        "G13",
        "the look whether the writer of a run lives",
        "runs/lease.py",
        "    if alive:\n        raise _in_use(storage, number, claim)\n",
        "",
        "tests/unit/runs/test_lease.py::test_a_second_live_writer_is_told_host_process_and_age",
    ),
]


def named(row: Row) -> str:
    return f"{row.guarantee} {row.taken_out}"


@cache
def claims(file: str) -> dict[str, set[str]]:
    """Return the guarantees that each test function of a file is marked with."""
    found: dict[str, set[str]] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            marks = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            marks = [one for one in marks if ast.unparse(one.func) == "pytest.mark.guarantee"]
            found[node.name] = {ast.literal_eval(argument) for one in marks for argument in one.args}
    return found


def test_every_guarantee_has_a_row() -> None:
    assert {row.guarantee for row in ROWS} == {f"G{number}" for number in range(1, 14)}


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_what_a_row_takes_out_is_there_and_its_test_claims_the_guarantee(row: Row) -> None:
    assert (SOURCE / row.file).read_text().count(row.old) == 1
    assert row.guarantee in claims(row.test.partition("::")[0])[row.function]
    lines = [line for line in GUARANTEES.read_text().splitlines() if line.startswith(f"| {row.guarantee} |")]
    assert [line for line in lines if row.taken_out in line and f"`{row.function}`" in line], "no row of the page"


@pytest.mark.deep
@pytest.mark.limit(180)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_test_fails_without_what_is_taken_out(row: Row, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(SOURCE.parent, source, ignore=shutil.ignore_patterns("__pycache__"))
    changed = source / "holdfast" / row.file
    changed.write_text(changed.read_text().replace(row.old, row.new))
    variables = {name: value for name, value in os.environ.items() if name != "HOLDFAST_DEEP"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", row.test],
        cwd=ROOT,
        env=variables | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
