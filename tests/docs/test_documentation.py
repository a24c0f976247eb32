"""The documents are true: every block runs, every name is there, every guarantee has a test, every link leads on."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
import holdfast.testing
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk import codec, manifest
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.testing import values
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
GUIDE, FORMAT, GUARANTEES = (ROOT / "docs" / name for name in ("guide.md", "format.md", "guarantees.md"))
DOCUMENTS = [
    path for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "integrations") for path in sorted(folder.glob("*.md"))
]
FORBIDDEN = ("TODO", "FIXME", "coming soon", "roadmap", "/work/", "/root/", "/home/", "not yet", "planned")
IMPORT_SECONDS = 0.15
# What the environments of the tests install: a block may need one of these, and no name that nobody installs.
FRAMEWORKS = {"deepspeed", "megatron", "mlflow", "ray", "torchtitan", "transformers", "wandb"}

# Blocks inside of HTML comments count too: they set up what the next one needs.
BLOCK = re.compile(r"^```(?P<language>\w+)(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Blocks


@dataclass(frozen=True)
class Block:
    """A fenced block: `python` or `console`, its options, its text, and its first line in the document. The option
    `needs=wandb,mlflow` names packages without which it is not run."""

    language: str
    options: dict[str, str]
    text: str
    line: int


def blocks_of(document: Path) -> list[Block]:
    content = document.read_text()
    found = []
    for match in BLOCK.finditer(content):
        options = {name: value for name, _, value in (word.partition("=") for word in match["words"].split())}
        line = content.count("\n", 0, match.start("text"))
        found.append(Block(match["language"], options, match["text"], line))
    return [block for block in found if block.language in ("python", "console")]


def compiled(block: Block, document: Path) -> Any:
    # Line breaks in front, so that a traceback names the line of the document.
    return compile("\n" * block.line + block.text, str(document), "exec")


def run_on_rank(rank: int, folder: Path, block: Block, document: Path) -> None:
    os.chdir(folder)
    exec(compiled(block, document), {"__name__": "snippet"})


def run_console(block: Block, document: Path, folder: Path) -> None:
    commands = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    assert commands, f"{relative(document)}:{block.line}: a console block without a command"
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "holdfast", f"{relative(document)}:{block.line}: {command}"
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        expected = int(block.options.get("exit", 0))
        assert done.returncode == expected, f"{relative(document)}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks_of(path)], ids=relative)
def test_every_block_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_state = holdfast.get_rng_state()
    names: dict[str, Any] = {"__name__": "snippet"}
    # A dataclass looks its module up by name.
    monkeypatch.setitem(sys.modules, "snippet", type(sys)("snippet"))
    missing: set[str] = set()
    for block in blocks_of(document):
        needs = {name for name in block.options.get("needs", "").split(",") if name}
        assert needs <= FRAMEWORKS, f"{relative(document)}:{block.line} needs {needs - FRAMEWORKS}"
        needed = {name for name in needs if find_spec(name) is None}
        if needed:
            missing |= needed
        elif block.language == "console":
            run_console(block, document, tmp_path)
        elif "ranks" in block.options:
            values(run_ranks(int(block.options["ranks"]), run_on_rank, tmp_path, block, document))
        else:
            exec(compiled(block, document), names)
    holdfast.set_rng_state(random_state)
    if missing:
        pytest.skip(f"some blocks need {', '.join(sorted(missing))}; `make frameworks` runs them")


def test_the_readers_documents_have_blocks() -> None:
    languages = {path.name: {block.language for block in blocks_of(path)} for path in DOCUMENTS}
    assert languages["README.md"] == {"python", "console"}
    assert languages["guide.md"] == {"python", "console"}
    assert languages["format.md"] == {"python"}


def test_the_reader_of_the_format_notices_every_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worked example reads real checkpoints; here it is shown that it also refuses."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet"}
    random_state = holdfast.get_rng_state()
    setup, reader, _ = blocks_of(FORMAT)
    assert "holdfast." not in reader.text
    assert "import holdfast" not in reader.text
    for block in (setup, reader):
        exec(compiled(block, FORMAT), names)
    holdfast.set_rng_state(random_state)
    folder = tmp_path / "runs" / "tiny" / "step-000000500"
    names["open_checkpoint"](folder)
    for file in ("manifest.json", "shared.json", "rank-00000.safetensors"):
        data = (folder / file).read_bytes()
        for place in (*range(0, min(len(data), 4096), 331), len(data) // 2, len(data) - 3):
            damaged = bytearray(data)
            damaged[place] ^= 1
            (folder / file).write_bytes(damaged)
            with pytest.raises((ValueError, KeyError, TypeError)):
                names["open_checkpoint"](folder)
        (folder / file).write_bytes(data)
    names["open_checkpoint"](folder)


# Names


def mentions(path: Path, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", path.read_text()) is not None


def test_every_public_name_is_documented() -> None:
    # The version needs no words.
    unknown = [name for name in holdfast.__all__ if name != "__version__" and not mentions(GUIDE, name)]
    assert unknown == []
    assert [name for name in holdfast.testing.__all__ if not mentions(GUIDE, name)] == []
    assert [name for name in LoadStrategy.__dataclass_fields__ if f"| `{name}` |" not in GUIDE.read_text()] == []


@pytest.mark.parametrize(
    "record",
    [
        manifest.Manifest,
        manifest.FileRecord,
        manifest.TensorRecord,
        manifest.ChunkRecord,
        manifest.TreeRecord,
        manifest.MeshRecord,
    ],
)
def test_every_field_of_the_manifest_is_in_the_format(record: type[msgspec.Struct]) -> None:
    text = FORMAT.read_text()
    assert [name for name in record.__struct_fields__ if f"`{name}`" not in text] == []


def test_the_format_has_every_element_type() -> None:
    text = FORMAT.read_text()
    for kind in ELEMENT_TYPES.values():
        extra = f"{kind.extra} |" if kind.extra else "|"
        assert f"| `{kind.name}` | {kind.item_bytes} | {kind.code} | {extra}" in text


def test_the_format_has_every_tag_of_the_codec() -> None:
    tags = re.compile(r'"(\$[a-z]+)"')
    assert set(tags.findall(codec.__doc__ or "")) == set(tags.findall(FORMAT.read_text()))


def test_the_architecture_lists_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = text.partition("## The packages")[2].split("```")[1]
    modules = [path.name for path in (ROOT / "src" / "holdfast").rglob("*.py")]
    listed = re.findall(r"\b(\w+\.py)\b", house)
    # Packages have no module of their own to speak of, but for the first.
    assert sorted(listed) == sorted([*(name for name in modules if name != "__init__.py"), "__init__.py"])


def names_in_source() -> set[str]:
    """Every name that the source defines or uses: classes, functions, parameters, attributes, and short texts."""
    found: set[str] = set()
    for path in (ROOT / "src" / "holdfast").rglob("*.py"):
        found |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            for field in ("name", "id", "attr", "arg"):
                value = getattr(node, field, None)
                found |= {value} if isinstance(value, str) else set()
    return found


def unknown_names(text: str) -> list[str]:
    """What stands in backticks and is no file of the repository and no name of the source."""
    known = names_in_source()
    roots = (ROOT, ROOT / "src" / "holdfast")
    unknown = []
    for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        is_path = "/" in quoted or quoted.endswith(".py")
        words = re.findall(r"[A-Za-z_]\w*", quoted)
        if is_path:
            there = any((root / quoted).exists() for root in roots)
        else:
            there = bool(words) and all(word in known for word in words)
        if not there:
            unknown.append(quoted)
    return unknown


def test_every_name_in_the_architecture_exists() -> None:
    assert unknown_names((ROOT / "docs" / "architecture.md").read_text()) == []


def test_a_name_that_does_not_exist_is_noticed() -> None:
    text = "`saving/plan.py`, `Storage`, `recall`, `ranks/ranks.py`, `decide(label, mine)`, `Catalog.frobnicate()`"
    assert unknown_names(text) == ["recall", "ranks/ranks.py", "Catalog.frobnicate()"]


# Guarantees


def claims() -> dict[str, set[str]]:
    """Which test files claim which guarantee."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == Path(__file__):
            continue
        for name in re.findall(r'guarantee\("(\w+)"\)', path.read_text()):
            found.setdefault(name, set()).add(relative(path))
    return found


def sections() -> dict[str, str]:
    """The guarantees' sections by their name."""
    parts = re.split(r"^## ", GUARANTEES.read_text(), flags=re.MULTILINE)[1:]
    return {part.partition(" ")[0]: part for part in parts if re.match(r"G\d+ ", part)}


def taken_out() -> str:
    """The section about what was taken out."""
    return GUARANTEES.read_text().partition("\n## What was taken out")[2].partition("\n## ")[0]


def test_every_guarantee_is_claimed_and_every_claim_is_a_guarantee() -> None:
    assert set(sections()) == set(claims())
    readme = re.findall(r"^\| (G\d+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert readme == list(sections())


@pytest.mark.parametrize("name", sections())
def test_the_tests_that_a_guarantee_names_claim_it(name: str) -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", sections()[name].partition("**Claimed by.**")[2]))
    assert named
    assert named <= claims()[name]


def test_the_table_of_what_was_taken_out_is_that_of_the_tests() -> None:
    tests = (ROOT / "tests" / "crash" / "test_crash_points.py").read_text()
    needed = next(
        node.value
        for node in ast.parse(tests).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NEEDED"
    )
    assert isinstance(needed, ast.Dict)
    rows = re.findall(r"^\| G1 \| the sync of ([^|]+) \|", taken_out(), flags=re.MULTILINE)
    assert rows == [ast.literal_eval(key) for key in needed.keys if key is not None]
    others = [ROOT / "tests" / "crash" / name for name in ("test_power_cut_images.py", "test_resave_crash_points.py")]
    every = tests + "".join(path.read_text() for path in others)
    # The tests of the other rows are looked up by `test_taken_out.py`.
    for test in re.findall(r"`(test_\w+_noticed)`", taken_out()):
        assert f"def {test}(" in every


# Links and words


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_link_leads_somewhere(document: Path) -> None:
    wrong = []
    for match in LINK.finditer(BLOCK.sub("", document.read_text())):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(match["target"])
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_a_document_speaks_of_what_is_there(document: Path) -> None:
    text = document.read_text().lower()
    assert [word for word in FORBIDDEN if word.lower() in text] == []


# What importing costs


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_holdfast_brings_neither_torch_nor_numpy() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'rich', 'typer') if name in sys.modules]"
    assert in_new_process(f"import sys, holdfast; print({heavy})") == "[]"
    looking = "holdfast.resolve, holdfast.peek, holdfast.is_restart, holdfast.checkpoints, holdfast.verify"
    assert in_new_process(f"import sys, holdfast; {looking}; print('torch' in sys.modules)") == "False"


def test_importing_holdfast_costs_little() -> None:
    code = "import time; start = time.process_time(); import holdfast; print(time.process_time() - start)"
    assert min(float(in_new_process(code)) for _ in range(5)) < IMPORT_SECONDS
