"""The demo is documentation that runs: it must work as it is, and must not be able to claim what it did not see."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
TIMEOUT_SECONDS = 400.0


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdfast_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_demo(*arguments: str | Path) -> tuple[int, str]:
    """The exit code and the output, in lines wide enough that no claim is broken in two."""
    process = subprocess.Popen(
        [sys.executable, DEMO, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except BaseException:
        # Not a kill: the demo has trainings of its own to end.
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        raise
    return process.returncode, output


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G8")
@pytest.mark.deep
def test_the_demo_shows_that_every_claim_holds(tmp_path: Path) -> None:
    out = tmp_path / "demo-out"
    code, output = run_demo("--quick", "--out", out)
    assert code == 0, output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == [
        "SIGKILL on all ranks leaves every committed checkpoint whole",
        "the run goes on from the newest checkpoint",
        "every loss equals the undisturbed run's, bit for bit",
        "so does the final state: weights, optimizer and torch's random state",
        "the same checkpoint resumes on 1 rank, weights bit for bit",
        "one flipped bit is found, and named",
        "a restore of the damaged step by name is refused",
        "restore('latest') falls back to the one before, and says so",
    ]
    assert {row[2] for row in rows} == {"yes"}
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_losses_that_are_the_same_to_the_last_bit_do_not_differ(demo: ModuleType) -> None:
    assert demo.differences({0: 0.1, 1: 2.0, 2: math.nan}, {1: 2.0, 2: math.nan}) == []


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        ({5: 2.0}, {5: math.nextafter(2.0, 3.0)}),
        ({5: 0.0}, {5: -0.0}),
        ({5: 2.0}, {5: math.nan}),
        ({4: 2.0}, {5: 2.0}),
    ],
    ids=["the last bit", "the sign of zero", "not a number", "a step that is not there"],
)
def test_losses_that_differ_at_all_differ(
    demo: ModuleType, reference: dict[int, float], other: dict[int, float]
) -> None:
    (difference,) = demo.differences(reference, other)
    assert difference.startswith("step 5:")


def exact_resume_holds(demo: ModuleType, resumed: dict[int, float], resumed_from: int | None) -> bool:
    """Whether the demo would claim an exact resume of a run of six steps that was killed after step 3."""
    plan = demo.Plan(steps=6, every=2, kill_after=3, branch_steps=1, branch_ranks=())
    reference = demo.Losses(None, "", {step: 3.0 - step / 7 for step in range(6)})
    killed = demo.Losses(None, "", {step: reference.by_step[step] for step in range(3)})
    claims = demo.check_exact_resume(reference, killed, demo.Losses(resumed_from, "", resumed), 1, plan)
    return demo.conclude(claims, 0.0) == 0


def test_a_loss_that_differs_makes_the_demo_fail(demo: ModuleType) -> None:
    right = {step: 3.0 - step / 7 for step in range(2, 6)}
    assert exact_resume_holds(demo, right, 1)
    assert not exact_resume_holds(demo, {**right, 5: math.nextafter(right[5], 9.0)}, 1)


def test_a_resume_that_leaves_steps_out_or_starts_afresh_makes_the_demo_fail(demo: ModuleType) -> None:
    right = {step: 3.0 - step / 7 for step in range(2, 6)}
    assert not exact_resume_holds(demo, {step: right[step] for step in (2, 3, 4)}, 1)
    assert not exact_resume_holds(demo, {step: right[step] for step in (3, 4, 5)}, 2)
    assert not exact_resume_holds(demo, {step: 3.0 - step / 7 for step in range(6)}, None)
    assert not exact_resume_holds(demo, {}, 1)


def test_a_demo_without_claims_fails(demo: ModuleType) -> None:
    assert demo.conclude([], 0.0) == 1


def test_a_folder_that_the_demo_did_not_make_is_not_emptied(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(demo.DemoError, match="will not be emptied"):
        demo.empty(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"


def test_a_folder_that_the_demo_made_is_emptied(demo: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo-out"
    demo.empty(out)
    (out / "losses.png").touch()
    demo.empty(out)
    assert not (out / "losses.png").exists()
