"""The links of a run lead to what people ask for, and never to what is gone."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.runs.catalog import Catalog
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.links import Links, point_latest
from holdfast.runs.readers import reading
from holdfast.runs.retention import KeepAll, KeepBest, KeepLast, KeepTagged
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import (
    FAR,
    HERE,
    Run,
    attempt,
    folder,
    rot,
)


def test_latest_leads_to_the_newest_also_when_it_was_lost_or_moved(run: Run) -> None:
    run.save(1)
    run.save(2)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}
    run.storage.features.links.remove("latest")
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}
    run.storage.features.links.point("latest", folder(1))
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}


def test_latest_is_not_moved_back_by_a_cleanup_that_listed_the_run_before_the_last_commit(run: Run) -> None:
    run.keep(KeepAll())
    run.save(1)
    links = Links(run.catalog, template=None, ranking=())
    listed = run.catalog.scan().checkpoints
    second = run.save(2)
    point_latest(run.catalog.storage, second.folder)
    links.update(listed)
    assert run.links == {"latest": second.folder}


class Closed(LocalStorage):
    """A storage in which one folder cannot be read."""

    closed = ""

    def open(self, key: str) -> Any:
        if self.closed and key.startswith(self.closed):
            raise StorageError("it may not be read", errno=errno.EACCES, file=key)
        return super().open(key)


def test_latest_is_not_moved_back_where_what_it_leads_to_cannot_be_read_now(run: Run) -> None:
    run.keep(KeepAll())
    run.save(1)
    storage = Closed(run.catalog.storage.url)
    catalog = Catalog(storage)
    listed = catalog.scan().checkpoints
    second = run.save(2)
    point_latest(storage, second.folder)
    storage.closed = second.folder
    Links(catalog, template=None, ranking=()).update(listed)
    assert run.links == {"latest": second.folder}


def test_best_leads_to_the_best_by_the_one_metric_that_is_kept_by(run: Run) -> None:
    run.keep(KeepLast(9) | KeepBest("loss", 2))
    for step, loss in enumerate([0.5, 0.25, float("nan"), 0.25, 3]):
        run.save(step, loss=loss)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(4), "best": folder(3)}


def test_with_several_metrics_each_has_a_link_and_the_first_is_the_best(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("val/loss") | KeepBest("acc@1", mode="max") | KeepBest("never seen"))
    run.save(1, **{"val/loss": 0.5, "acc@1": 0.5})
    run.save(2, **{"val/loss": 0.75, "acc@1": 0.75})
    run.keeper.clean_up()
    assert run.links == {
        "latest": folder(2),
        "best": folder(1),
        "best-val_loss": folder(1),
        "best-acc_1": folder(2),
    }


def test_links_to_a_best_that_nobody_asks_for_any_more_go(run: Run) -> None:
    run.keep(KeepBest("loss") | KeepBest("acc"))
    run.save(1, loss=1, acc=1)
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "best", "best-loss", "best-acc"}
    run.keep(KeepBest("acc"))
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "best"}
    run.keep(KeepLast(1))
    run.keeper.clean_up()
    assert set(run.links) == {"latest"}


def test_late_metrics_move_the_best(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    first, second = run.save(1, loss=2.0), run.save(2)
    run.keeper.clean_up()
    assert run.links["best"] == first.folder
    run.catalog.annotations.add(second, metrics={"loss": 1.0})
    run.keeper.clean_up()
    assert run.links["best"] == second.folder


def test_no_link_leads_to_a_damaged_one(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    first, second = run.save(1, loss=2.0), run.save(2, loss=1.0)
    rot(second)
    run.keeper.suspect({second: "its bytes are not what they were"})
    run.keeper.clean_up()
    assert run.links == {"latest": first.folder, "best": first.folder}


def test_what_is_suspected_and_sound_counts(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    run.save(1, loss=2.0)
    second = run.save(2, loss=1.0)
    run.keeper.suspect({second: "it could not be read for a moment"})
    run.keeper.clean_up()
    assert run.links == {"latest": second.folder, "best": second.folder}
    assert Catalog(run.storage).scan().checkpoints[0].damage == ""


def test_a_template_gives_each_checkpoint_a_name_and_takes_it_back(run: Run) -> None:
    run.keep(KeepLast(2), LinkTemplate("{name}--{loss:.2f}-{step}"))
    for step in (1, 2, 3):
        run.save(step, loss=step / 4)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(3), "run--0.50-2": folder(2), "run--0.75-3": folder(3)}


def test_a_name_follows_the_metrics_and_one_that_cannot_be_made_is_left_out(run: Run) -> None:
    run.keep(None, LinkTemplate("{name}--{loss:.2f}-{step}"))
    first = run.save(1)
    run.save(2, loss=0.5)
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--0.50-2"}
    run.catalog.annotations.add(first, metrics={"loss": 0.125})
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--0.12-1", "run--0.50-2"}
    run.catalog.annotations.add(first, metrics={"loss": 8.0})
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--8.00-1", "run--0.50-2"}


def test_what_others_made_is_never_touched(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run.keep(KeepLast(1) | KeepTagged(), LinkTemplate("{name}--{loss:.2f}-{step}"))
    run.save(1, loss=0.5, tags=("gold",))
    foreign = {
        "mine": folder(1),
        "best-of-all": "../elsewhere",
        "run--0.50-1.bak": folder(1),
        "run--0.50-77": "/somewhere",
        "bestiary": folder(1),
        "inside": f"{folder(77)}/shared.json",
        "odd": "step-77",
        "roundabout": f"./{folder(77)}",
    }
    for name, target in foreign.items():
        os.symlink(target, root / name)
    (root / "notes.txt").write_text("mine")
    run.save(2, loss=0.25)
    run.keeper.clean_up()
    assert run.steps == [2, 1]
    assert {name: target for name, target in run.links.items() if name in foreign} == foreign
    assert (root / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("links", [True, None, LinkTemplate("{name}--{step}")], ids=["true", "none", "template"])
def test_a_link_to_a_checkpoint_goes_with_it_whoever_made_it(run: Run, links: Any, tmp_path: Path) -> None:
    run.keep(KeepLast(1), links)
    run.save(1)
    run.save(2)
    for name, target in {"old": folder(1), "never": folder(77), "mine": folder(2)}.items():
        os.symlink(target, tmp_path / "run" / name)
    run.keeper.clean_up()
    assert {"old", "never", "mine"} & set(run.links) == {"mine"}


def test_a_link_goes_with_a_checkpoint_that_a_later_cleanup_removes(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(2))
    run.save(1)
    run.keeper.clean_up()
    os.symlink(folder(1), tmp_path / "run" / "mine")
    os.symlink(folder(2), tmp_path / "run" / "yours")
    for step in (2, 3):
        run.save(step)
        run.keeper.clean_up_in_background()
        run.keeper.wait()
    assert run.steps == [3, 2]
    assert {"mine", "yours"} & set(run.links) == {"yours"}


class Watched(LocalStorage):
    """A folder of which something is known when what stays is made durable: a plan is made, nothing is removed yet."""

    planned: Callable[[], object] | None = None

    def sync(self, folder: str) -> None:
        planned, self.planned = self.planned, None
        if planned is not None:
            planned()
        super().sync(folder)


def test_a_link_to_what_was_about_to_go_and_is_read_stays(tmp_path: Path) -> None:
    storage = Watched(tmp_path / "run")
    run = Run(storage, KeepLast(1))
    run.save(1)
    run.save(2)
    os.symlink(folder(1), tmp_path / "run" / "mine")
    with ExitStack() as stack:
        storage.planned = lambda: stack.enter_context(reading(storage, folder(1)))
        assert [decision.keep for decision in run.keeper.clean_up()] == [True, False]
        assert run.steps == [2, 1]
        assert "mine" in run.links
    run.keeper.clean_up()
    assert run.steps == [2]
    assert "mine" not in run.links


def test_a_link_to_what_is_gone_but_for_a_reader_of_its_bytes_goes(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1))
    first = run.save(1)
    run.save(2)
    os.symlink(first.folder, tmp_path / "run" / "mine")
    run.keeper._doomed[first.folder] = run.keeper._claim_of(first.folder)
    run.catalog.uncommit(first.folder)
    with reading(run.storage, first.folder):
        run.keeper.clean_up()
        assert first.folder in run.names
        assert set(run.links) == {"latest"}


def test_a_link_to_what_is_being_written_or_cannot_be_read_stays(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1))
    unreadable = run.save(1).folder
    run.save(2)
    (tmp_path / "run" / unreadable / "manifest.json").write_text("{")
    under_way = attempt(run, 7, HERE, lease=run.saver.lease)
    closed = attempt(run, 8, FAR)
    for name, target in {"a": unreadable, "b": under_way, "c": closed}.items():
        os.symlink(target, tmp_path / "run" / name)
    run.catalog.attempts.close_older(run.saver.lease)
    run.keeper.clean_up()
    assert {"a", "b", "c"} & set(run.links) == {"a", "b"}


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_file_in_the_place_of_a_link_stays_and_the_rest_is_done(
    run: Run, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.keep(KeepLast(1) | KeepBest("loss"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    run.save(1, loss=2)
    run.save(2, loss=1)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run.keeper.clean_up()
    assert (tmp_path / "run" / name).read_text() == "mine"
    assert "the links could not be moved" in caplog.text
    assert run.steps == [2]


def test_a_template_that_changed_leaves_no_link_that_leads_nowhere(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1), LinkTemplate("{name}-at-{step}"))
    run.save(1)
    run.keeper.clean_up()
    run.keep(KeepLast(1), LinkTemplate("{name}--{step:09d}"))
    run.save(2)
    run.keeper.clean_up()
    assert [name for name in run.links if not (tmp_path / "run" / name).exists()] == []


def test_without_links_none_is_made_or_moved(run: Run) -> None:
    run.keep(KeepLast(1) | KeepBest("loss"), links=False)
    run.save(1, loss=1)
    run.storage.features.links.remove("latest")
    run.storage.features.links.point("best", folder(1))
    run.storage.features.links.point("mine", folder(7))
    run.keeper.clean_up()
    assert run.links == {"best": folder(1)}, "and what would lead nowhere goes"


def test_a_storage_without_links_is_cleaned_up_all_the_same() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    run.save(1)
    run.save(2)
    run.keeper.clean_up()
    assert run.steps == [2]
