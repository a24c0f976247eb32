"""Every attack of `attacks/` is refused by Holdfast by name, within bounded memory, and touches nothing outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import attack_named, attack_names
from attacks._limits import refused_in_a_process
from tests.security.scene import bytes_on_disk
from tests.sizes import DEEP

REFUSALS = {"CorruptCheckpointError", "UnsafeContentError", "UnsupportedFormatError", "DamagedRecordError"}


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", attack_names())
def test_an_attack_is_refused_by_name_and_harms_stock_tools_where_it_says_so(name: str, tmp_path: Path) -> None:
    attack = attack_named(name)
    folder, scratch = tmp_path / "attack", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (tmp_path / "canary").write_bytes(b"canary")
    path = attack.make(folder)
    before = bytes_on_disk(tmp_path)
    refusal = refused_in_a_process(name, path, TMPDIR=str(scratch), HOME=str(scratch))
    assert refusal.type in REFUSALS, refusal
    assert "no format that is known" not in refusal.message
    assert bytes_on_disk(tmp_path) == before
    if DEEP or not attack_names().index(name) % 5:
        # Some of them keep a processor busy for ten seconds.
        assert attack.stock(path) is not False


def test_every_attack_says_what_it_does() -> None:
    assert len(attack_names()) >= 20
    for name in attack_names():
        attack = attack_named(name)
        assert attack.WHAT
        assert "\n" not in attack.WHAT
        assert (attack.__doc__ or "").endswith(".")
