"""Run attacks in processes of their own, each forked from one that has imported what is slow to import.

Requests come as lines of JSON on the standard input, and an answer to each leaves on the standard output. The limits on
memory, files and processor time hold in the forked process alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Answer requests until there are no more."""
    import numpy
    import torch
    import torch.distributed.checkpoint
    from torch.serialization import load as torch_load

    from holdfast.formats.registry import format_named, format_names

    for name in format_names():
        format_named(name)
    numpy.zeros(1)
    torch.ones(8).sum()
    assert torch_load is not None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Nothing else that prints may come between the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), file=answers)


def _forked(request: dict[str, Any]) -> dict[str, str]:
    """Return what a forked process makes of a request, or how it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = json.dumps(_answer(request))
        except BaseException as error:
            # The error of a tool that ran out of memory may still hold all of it.
            answer = json.dumps({"error": f"{type(error).__name__}: {str(error)[:1000]}"})
            traceback.clear_frames(error.__traceback__)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"error": f"killed by signal {-code}"}
    answer: dict[str, str] = json.loads(data)
    return answer


def _answer(request: dict[str, Any]) -> dict[str, str]:
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if request["kind"] == "stock":
        sys.argv = ["-c", *request["arguments"]]
        space: dict[str, Any] = {"sys": sys}
        exec(request["imports"], space)
        _limit(**request["limits"])
        exec(request["code"], space)
        return {"error": ""}
    from attacks import attack_named
    from holdfast.errors import HoldfastError

    attack = attack_named(request["name"])
    _limit(**request["limits"])
    refusal = attack.refused(request["path"])
    if not isinstance(refusal, HoldfastError):
        return {"error": f"{refusal!r:.500} is no HoldfastError"}
    return {"error": "", "type": type(refusal).__name__, "message": str(refusal)}


def _limit(memory_bytes: int, file_bytes: int, processor_seconds: int) -> None:
    with open("/proc/self/status") as status:
        size = next(int(line.split()[1]) for line in status if line.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes,) * 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + processor_seconds,) * 2)


if __name__ == "__main__":
    main()
