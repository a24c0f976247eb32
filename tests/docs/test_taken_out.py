"""Each guarantee is noticed when it is broken: a protection is taken out of the source, and a test that claims the
guarantee fails.

`make test` looks whether the table fits the source, the tests and `docs/guarantees.md`; `make deep` runs each named
test on a copy of the source with its change.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs" / "guarantees.md"
HEADING = "## What was taken out, and what failed then"
# Less than the limit of the test that waits for it.
SECONDS = 150


@dataclass(frozen=True)
class Mutation:
    """One protection that is taken out.

    taken_out: what it is, as `docs/guarantees.md` says it. file: in `src/holdfast`. old, new: its only text there, and
    what takes the place of that. test: a test of `make test` that claims the guarantee and fails then; of a function
    with parameters all are run, or the one that is named.
    """

    guarantee: str
    taken_out: str
    file: str
    old: str
    new: str
    test: str

    @property
    def source(self) -> Path:
        return ROOT / "src" / "holdfast" / self.file

    @property
    def test_file(self) -> Path:
        return ROOT / self.test.partition("::")[0]

    @property
    def test_name(self) -> str:
        return self.test.partition("::")[2].partition("[")[0]

    def __str__(self) -> str:
        return f"{self.guarantee}, {self.taken_out}"


MUTATIONS = [
    Mutation(
        "G1",
        "before the files of a failed save are removed, the look whether it was committed",
        "saving/outcome.py",
        "        if any(entry.name == paths.MANIFEST for entry in catalog.storage.entries(folder)):\n",
        "        if False:\n",
        "tests/unit/saving/test_outcome.py::test_no_file_of_a_committed_checkpoint_is_removed",
    ),
    Mutation(
        "G1",
        "before the files of a deleted checkpoint go, the sync of the folder that its manifest was removed from",
        "runs/catalog.py",
        "        # Before any byte goes: a power cut must not bring the manifest back without them.\n"
        "        self.storage.sync(folder)\n",
        "",
        "tests/unit/runs/test_cleanup.py::test_a_power_cut_at_any_call_of_a_prune_leaves_what_the_next_writer_finishes",
    ),
    Mutation(
        "G2",
        "the comparison of the ranks' copies of a leaf before the first save",
        "saving/coordinator.py",
        "        return self._stop_for(differing) if differing else self._start(request, ())\n",
        "        return self._start(request, ())\n",
        "tests/distributed/test_replicas.py::"
        "test_a_drifted_replica_is_an_error_that_names_leaf_and_ranks_until_it_is_mended",
    ),
    Mutation(
        "G2",
        "the look whether a tensor is still of the type and the shape that the last save found",
        "state/signatures.py",
        "            if _columns(block) != known:\n                return None\n",
        "",
        "tests/unit/state/test_structure_cache.py::"
        "test_a_state_that_changed_between_two_saves_is_saved_as_it_is[another shape-sync]",
    ),
    Mutation(
        "G3",
        "the comparison of a manifest with its digest",
        "ondisk/manifest.py",
        "    if digest_of(memoryview(envelope.manifest)) != envelope.digest:\n",
        "    if False:\n",
        "tests/security/test_hostile_checkpoints.py::test_a_damaged_manifest_is_named_and_nothing_is_taken_from_it",
    ),
    Mutation(
        "G3",
        "the comparison of a tensor's bytes with their digest",
        "storage/blocks.py",
        "        if blake3(memory[low - offset : high - offset]).hexdigest() != region.digests[index]:\n",
        "        if False:\n",
        "tests/security/test_hostile_checkpoints.py::test_latest_falls_back_over_a_flipped_bit[rank-00000.safetensors]",
    ),
    Mutation(
        "G4",
        "tags, among the reasons to keep a checkpoint",
        "runs/retention.py",
        "(*policy.parts(), KeepTagged())",
        "policy.parts()",
        "tests/behaviour/test_life_in_one_process.py::test_a_tagged_checkpoint_stays_until_the_tag_is_taken_back[sync]",
    ),
    Mutation(
        "G4",
        "before a removal, the look for what was noted since the decision",
        "runs/cleanup.py",
        "            if not set(self._catalog.annotations.names()) <= set(notes):\n                return False\n",
        "",
        "tests/behaviour/test_life_in_one_process.py::test_what_is_said_while_others_are_being_removed_counts[tag]",
    ),
    Mutation(
        "G5",
        "the comparison of the calls that the ranks are in",
        "ranks/messages.py",
        "        if message.label != label:\n",
        "        if False:\n",
        "tests/unit/ranks/test_store.py::test_ranks_that_call_different_things_are_told_so_at_once[0]",
    ),
    Mutation(
        "G5",
        "the rank on which it happened, in an error that all raise",
        "ranks/messages.py",
        '            fields.setdefault("rank", rank)\n',
        "",
        "tests/unit/ranks/test_store.py::"
        "test_an_error_on_any_rank_is_raised_on_all_with_its_fields_and_that_rank[1-StorageError]",
    ),
    Mutation(
        "G6",
        "after a commit that failed half-way, the removal of its manifest",
        "runs/catalog.py",
        "            _withdraw(self.storage, manifest.folder, error)\n",
        "",
        "tests/crash/test_after_the_manifest.py::"
        "test_a_save_that_was_reported_as_failed_is_not_brought_back_by_a_power_cut[sync]",
    ),
    Mutation(
        "G6",
        "the note that a failure was raised",
        "saving/pending.py",
        "            self.reported = True\n",
        "",
        "tests/unit/manager/test_manager.py::"
        "test_a_save_that_fails_in_the_middle_leaves_the_run_as_it_was_and_the_next_one_works[async]",
    ),
    Mutation(
        "G7",
        "the refusal of state that does not fit, where no leaf is missing",
        "loading/verdict.py",
        "    if mismatched or (strategy.strict and (missing or unexpected)):\n",
        "    if strategy.strict and (missing or unexpected):\n",
        "tests/behaviour/test_strictness.py::test_another_number_of_parameter_groups_is_a_mismatch[4-2]",
    ),
    Mutation(
        "G7",
        "the look for live tensors that share memory",
        "loading/filling.py",
        '        refuse_conflicts(self._checkpoint, [*self._live, *self._copied], checked=self._verify == "full")\n',
        "",
        "tests/behaviour/test_shared_memory.py::test_a_momentum_buffer_in_the_memory_of_its_weight_is_refused",
    ),
    Mutation(
        "G8",
        "the random state, in a restore",
        "loading/pipeline.py",
        "        if not self._request.defer_rng:\n",
        "        if False:\n",
        "tests/distributed/test_exact_resume.py::test_one_process_resumes_exactly",
    ),
    Mutation(
        "G8",
        "the state of components that are not attached yet, in a save",
        "saving/pipeline.py",
        "                    carried=wanted.carried,\n",
        "",
        "tests/unit/loading/test_carrying.py::"
        "test_a_run_that_was_saved_and_restarted_before_the_attach_still_gives_the_late_state[sync]",
    ),
    Mutation(
        "G9",
        "the option by which the writer's interpreter does not import from the current folder",
        "saving/writer/launch.py",
        'sys.executable, "-P", "-s", "-c"',
        'sys.executable, "-s", "-c"',
        "tests/security/test_hostile_folder.py::test_no_module_of_the_current_folder_runs_in_the_writer[text]",
    ),
    Mutation(
        "G9",
        "the flag by which no link is followed in the place of a folder",
        "storage/local/disk.py",
        "_FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder",
        "_FOLDER_FLAGS, dir_fd=folder",
        "tests/security/test_hostile_checkpoints.py::test_a_link_in_the_place_of_a_checkpoints_folder_is_not_followed",
    ),
    Mutation(
        "G10",
        "the capture of an optimizer's state without the step by which PyTorch prepares one that has none",
        "state/optimizers.py",
        "    packed = optimizer.state_dict()\n",
        "    from torch.distributed.checkpoint.state_dict import _init_optim_state\n\n"
        "    _init_optim_state(optimizer)\n"
        "    packed = optimizer.state_dict()\n",
        "tests/distributed/test_parallel.py::test_saving_leaves_a_fresh_optimizer_fresh[AdamW]",
    ),
    Mutation(
        "G10",
        "the limit to models and optimizers of what a new manager asks for its state",
        "state/state_dicts.py",
        "        elif not isinstance(inner, torch.nn.Module) or _has_no_memory(inner):\n",
        "        elif isinstance(inner, torch.nn.Module) and _has_no_memory(inner):\n",
        "tests/unit/manager/test_components.py::test_building_a_manager_asks_only_models_and_optimizers",
    ),
    Mutation(
        "G11",
        "the error where a selector finds nothing",
        "runs/catalog.py",
        "        if found is None:\n            raise not_found(self.storage, selector, scan)\n        return found\n",
        "        return found or scan.checkpoints[0]\n",
        "tests/unit/manager/test_manager.py::test_what_is_asked_for_by_name_and_is_not_there_is_an_error[7]",
    ),
    Mutation(
        "G11",
        "damaged checkpoints, among what a run holds",
        "runs/catalog.py",
        "        return bool(scan.checkpoints or scan.damaged)\n",
        "        return bool(scan.checkpoints)\n",
        "tests/unit/manager/test_manager.py::test_a_run_with_nothing_but_damage_is_a_restart",
    ),
    Mutation(
        "G12",
        "the look at the number of a format",
        "ondisk/manifest.py",
        "    if envelope.holdfast_format > FORMAT:\n",
        "    if False:\n",
        "tests/unit/manager/test_manager.py::test_a_newer_format_is_refused_by_name",
    ),
    Mutation(
        "G12",
        "the exception for older records, which have no digest",
        "ondisk/decoding.py",
        "        if b'\"digest\"' in tail:\n",
        "        if True:\n",
        "tests/security/test_hostile_runs.py::"
        "test_a_record_of_an_older_version_which_has_no_digest_is_read[AttemptRecord]",
    ),
    Mutation(
        "G13",
        "the refusal of a run whose writer lives",
        "runs/lease.py",
        "    if alive:\n        raise _in_use(storage, number, claim)\n",
        "",
        "tests/unit/runs/test_lease.py::test_a_second_live_writer_is_told_host_process_and_age",
    ),
    Mutation(
        "G13",
        "before a commit, the look whether another process has taken the run over",
        "saving/commit.py",
        "    require_number(catalog.storage, facts.lease, facts.lease_token)\n    _require_attempt(facts, catalog)\n",
        "    _require_attempt(facts, catalog)\n",
        "tests/unit/runs/test_lease.py::"
        "test_at_whatever_operation_a_writer_is_overtaken_it_commits_before_or_not_at_all",
    ),
]


# The table


def rows() -> list[tuple[str, ...]]:
    """Return the cells of each row of the table in the document, without those of its head."""
    section = GUARANTEES.read_text().partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| G\d+ \|", line)]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def mutated_text(mutation: Mutation) -> str:
    text = mutation.source.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has the text {text.count(mutation.old)} times"
    return text.replace(mutation.old, mutation.new)


def marks_of(path: Path, test: str) -> list[str]:
    """Return the marks of a test, and of its file, as they are written."""
    body = ast.parse(path.read_text()).body
    marks = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark"
    ]
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert len(found) == 1, f"{path} has {len(found)} functions {test}"
    return [ast.unparse(mark) for mark in (*marks, *found[0].decorator_list)]


def test_every_guarantee_has_a_protection_that_is_taken_out() -> None:
    guarantees = re.findall(r"^## (G\d+) ", GUARANTEES.read_text(), flags=re.MULTILINE)
    assert list(dict.fromkeys(mutation.guarantee for mutation in MUTATIONS)) == guarantees
    assert list(dict.fromkeys(row[0] for row in rows())) == guarantees


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_fits_the_source_the_tests_and_the_document(mutation: Mutation) -> None:
    compile(mutated_text(mutation), mutation.file, "exec")
    marks = marks_of(mutation.test_file, mutation.test_name)
    assert f"pytest.mark.guarantee('{mutation.guarantee}')" in marks
    assert not any("mark.deep" in mark for mark in marks), "the test belongs to `make test`"
    row = (mutation.guarantee, mutation.taken_out, f"`{mutation.test_name}`")
    assert [found[:3] for found in rows()].count(row) == 1


def test_the_other_rows_are_those_of_the_crash_points() -> None:
    """They stand first, and are checked by `test_documentation.py`."""
    ours = [(mutation.guarantee, mutation.taken_out, f"`{mutation.test_name}`") for mutation in MUTATIONS]
    others, last = rows()[: -len(ours)], rows()[-len(ours) :]
    assert [row[:3] for row in last] == ours
    assert all(row[0] == "G1" and (row[2] == "the same" or row[2].endswith("_noticed`")) for row in others)
    assert all(len(row) == 4 and row[3] for row in rows())


# The tests, on a copy of the source


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A copy of `src`, without compiled modules."""
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    yield copy
    shutil.rmtree(copy)


def run(source: Path, *tests: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run tests with the package that lies in `source`; their processes find it there, too."""
    variables = {name: value for name, value in os.environ.items() if name != "HOLDFAST_DEEP"}
    # In front of the folder of an installation for development.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    where = subprocess.run(
        [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds)


@pytest.mark.deep
@pytest.mark.limit(180)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_without_a_protection_a_test_of_its_guarantee_fails(mutation: Mutation, source: Path) -> None:
    (source / "holdfast" / mutation.file).write_text(mutated_text(mutation))
    done = run(source, mutation.test)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = f"FAILED {mutation.test.partition('[')[0]}"
    assert failed in done.stdout, done.stdout + done.stderr
    # It fails because it notices, and not at its time limit.
    assert not re.search(r"took more than \d+ s", done.stdout), done.stdout


@pytest.mark.deep
@pytest.mark.limit(600)
def test_with_nothing_taken_out_these_tests_pass(source: Path) -> None:
    done = run(source, *(mutation.test for mutation in MUTATIONS), seconds=570)
    assert done.returncode == 0, done.stdout + done.stderr
