"""Typed values come out of bytes, also when several threads meet their class for the first time together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.ondisk import decoding

SOURCE = Path(decoding.__file__).parents[1]

# Without the lock this ends in a segmentation fault, within a few rounds: hence a process of its own.
MEETING = """
import sys, threading
import msgspec
from holdfast.ondisk.decoding import {function}

sys.setswitchinterval(1e-6)


def fresh(name, fields):
    return type(msgspec.Struct)(name, (msgspec.Struct,), {{"__annotations__": fields, "__module__": __name__}})


failed = []
for _ in range(100):
    one = fresh("One", {{f"f{{index}}": "int | None" for index in range(6)}})
    two = fresh("Two", {{f"f{{index}}": "str | None" for index in range(6)}})
    kind = fresh("Both", {{"one": one, "two": two, "three": int}})
    said = {{"one": {{f"f{{i}}": 1 for i in range(6)}}, "two": {{f"f{{i}}": "a" for i in range(6)}}, "three": 3}}
    data = msgspec.{form}.encode(said)
    together = threading.Barrier(4)

    def read():
        together.wait()
        value = {function}(data, kind)
        if msgspec.to_builtins(value) != said:
            failed.append(value)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(failed))
"""


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_threads_that_meet_a_class_together_all_get_the_value(form: str) -> None:
    script = MEETING.format(form=form, function=f"from_{form}")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_bytes_that_say_something_else_are_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        decoding.from_json(b'["a"]', list[int])
    with pytest.raises(msgspec.DecodeError):
        decoding.from_msgpack(b"\xc1", int)


def test_no_other_module_makes_typed_decoders_of_its_own() -> None:
    typed = re.compile(r"msgspec\.(?:(?:json|msgpack)\.(?:Decoder\(|decode\(.*type=)|convert\()")
    made = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name not in ("decoding.py",)
        for line in path.read_text().splitlines()
        if typed.search(line)
    ]
    assert made == []
    for line in ("msgspec.json.decode(data, type=Note)", "msgspec.msgpack.Decoder(Note)", "msgspec.convert(x, Note)"):
        assert typed.search(line)
