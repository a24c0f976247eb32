"""Run pytest, and what failed in it once more, alone. What passes then is named as flaky and does not fail the run.

    python -m tests.second_look [arguments of pytest]

More than two flaky tests fail the run nevertheless. Where FLAKY_TESTS names a file, the runs that share it are counted
together. The tests that fail for one fixture count once. A flaky test is a defect: find its cause before other work.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.testing.processes import descendants

_MAX_FLAKY = 2
_MAX_LOOKS = 8
_FAILURES = "SECOND_LOOK_FAILURES"
_LEDGER = "FLAKY_TESTS"
_LINES = 40
# More than a test and its fixtures may take together.
_SILENT_SECONDS = 600


class Recorder:
    """Writes what failed, as {group: [[test, first lines of its failure], ...]}, where a group has one cause."""

    def __init__(self) -> None:
        self.groups: dict[str, list[tuple[str, str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            text = report.longreprtext
            # At once: all else that pytest says of it comes at the end.
            print(f"\nFAILED {report.nodeid}: {_end_of(text).splitlines()[-1].strip() if text else ''}", flush=True)
            crash = getattr(report.longrepr, "reprcrash", None)
            is_of_fixture = report.when != "call" and crash is not None
            group = f"{report.fspath}:{crash.path}:{crash.lineno}" if is_of_fixture else report.nodeid
            # What is left at the end of a file was made by any of its tests.
            name = report.nodeid if report.when != "teardown" else report.nodeid.partition("::")[0]
            self.groups.setdefault(group, []).append((name, text))

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[_FAILURES]).write_text(json.dumps(self.groups))


def pytest_configure(config: pytest.Config) -> None:
    """Record the failures of a run that `main` has started; the workers of pytest-xdist report theirs to it."""
    if os.environ.get(_FAILURES) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments and return the exit code of the run."""
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder, "failures.json")
        code = _run_pytest(arguments, {_FAILURES: str(failures)})
        if code != pytest.ExitCode.TESTS_FAILED or not failures.exists():
            return code
        groups = list(json.loads(failures.read_text()).values())
    if not groups:
        return code
    if len(groups) > _MAX_LOOKS:
        print(f"\n{len(groups)} causes of failure: too many for a second look")
        return code
    flaky = [tests for tests in groups if _passes_alone(tests)]
    for tests in flaky:
        name, text = tests[0]
        print(f"\n{name} failed, and passed alone. Its first failure:\n{_end_of(text)}")
    names = _noted(tests[0][0] for tests in flaky)
    for name in names:
        print(f"flaky: {name}")
    if len(flaky) < len(groups):
        print(f"{len(groups) - len(flaky)} failed in the second look, too")
        return code
    if len(names) > _MAX_FLAKY:
        print(f"{len(names)} flaky tests, and at most {_MAX_FLAKY} are forgiven: failed")
        return code
    return 0


def _run_pytest(arguments: list[str], variables: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tests.second_look", *arguments]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.fileno()
        while select.select([output], [], [], _SILENT_SECONDS)[0]:
            text = os.read(output, 1 << 16)
            if not text:
                return process.wait()
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
        # pytest-xdist can wait for ever for a worker that took the place of one that was ended.
        print(f"\nno word of pytest for {_SILENT_SECONDS} s: ended", flush=True)
        for one in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        return int(pytest.ExitCode.INTERNAL_ERROR)


def _passes_alone(tests: list[list[str]]) -> bool:
    names = list(dict.fromkeys(name for name, _ in tests))
    more = f" and {len(names) - 1} more of its fixture" if names[1:] else ""
    print(f"\nA second look at {names[0]}{more}", flush=True)
    return _run_pytest(["-p", "no:cacheprovider", "-p", "no:xdist", *names], {_FAILURES: ""}) == 0


def _noted(names: Iterable[str]) -> list[str]:
    """Add names to those that the runs before have found, and return all."""
    ledger = os.environ.get(_LEDGER)
    if not ledger:
        return list(names)
    with open(ledger, "a") as file:
        file.writelines(f"{name}\n" for name in names)
    return Path(ledger).read_text().splitlines()


def _end_of(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LINES:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
