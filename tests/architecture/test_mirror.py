"""tests/unit mirrors src/holdfast: the tests of a module are found by its path, or listed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import SOURCE
from tests.architecture.mirror import has_logic, outdated, without_module, without_test

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"

# Modules without a file of their own, with the tests that run them. A package stands for all of its modules.
ELSEWHERE = {
    "__main__": "tests/unit/cli/test_commands.py",
    # Other people's API, asked as they ask it.
    "formats/dcp": "tests/compat/test_dcp.py tests/compat/test_dcp_storage.py tests/compat/test_dcp_resharding.py",
    # Records and parts of a format, tested through the format or through what uses all of them.
    "cli/import_": "tests/unit/formats/importing/test_importing.py tests/compat/test_import.py",
    "formats/base": "tests/unit/formats/test_registry.py",
    "formats/dcp_folders/dcp_metadata": "tests/unit/formats/dcp_folders/test_dcp_folder.py",
    "formats/exporting/components": "tests/unit/formats/exporting/test_export.py",
    "formats/exporting/metadata_files": "tests/unit/formats/hub/test_huggingface.py",
    "formats/exporting/read_ahead": "tests/unit/formats/exporting/test_export.py",
    "formats/hub/folder": "tests/unit/formats/hub/test_huggingface.py",
    "formats/hub/peft": "tests/unit/formats/hub/test_huggingface.py tests/compat/test_transformers.py",
    "formats/hub/safetensors": "tests/unit/formats/exporting/test_export.py tests/unit/formats/weights/test_load.py",
    "formats/importing/models": "tests/unit/formats/importing/test_optimizers.py",
    "formats/importing/naming": "tests/unit/formats/importing/test_optimizers.py",
    "formats/importing/accelerate_folder": "tests/integrations/test_accelerate.py",
    "formats/importing/lightning": "tests/unit/formats/importing/test_importing.py tests/compat/test_import.py",
    "formats/importing/plain": "tests/unit/formats/importing/test_importing.py",
    "formats/importing/random_state": "tests/unit/formats/importing/test_importing.py tests/compat/test_import.py",
    "formats/importing/storing": "tests/unit/formats/importing/test_importing.py",
    "formats/nemo/nemo_config": "tests/unit/formats/nemo/test_nemo.py",
    "formats/source": "tests/unit/formats/test_reading.py",
    "formats/torch_files/pickle_machine": "tests/unit/formats/torch_files/test_pickles.py",
    "formats/torch_files/pickle_operations": "tests/unit/formats/torch_files/test_pickles.py",
    "formats/torch_files/pickle_writing": "tests/unit/formats/torch_files/test_torch_writing.py",
    "formats/torch_files/stored_tree": "tests/unit/formats/torch_files/test_torch_file.py",
    "formats/weights/filling": "tests/unit/formats/weights/test_load.py",
    "formats/weights/fitting": "tests/unit/formats/weights/test_load.py",
    "formats/weights/meta": "tests/unit/formats/weights/test_load.py tests/distributed/test_load_weights.py",
    "formats/weights/report": "tests/unit/formats/weights/test_load.py",
    # Each with the real framework.
    "integrations/accelerate": "tests/integrations/test_accelerate.py",
    "integrations/megatron": "tests/integrations/test_megatron_core.py",
    "integrations/megatron_bridge": "tests/integrations/test_megatron_bridge.py",
    "integrations/megatron_sharded": "tests/integrations/test_megatron_sharded.py",
    "integrations/megatron_state": "tests/integrations/test_megatron_bridge.py",
    "integrations/megatron_tracker": "tests/integrations/test_megatron_bridge.py",
    "integrations/deepspeed": "tests/integrations/test_deepspeed.py",
    "integrations/lightning": "tests/integrations/test_lightning.py",
    "integrations/mlflow": "tests/integrations/test_observers.py",
    "integrations/observers": "tests/integrations/test_observers.py",
    "integrations/prometheus": "tests/integrations/test_observers.py",
    "integrations/ray": "tests/integrations/test_ray.py",
    "integrations/tensorboard": "tests/integrations/test_observers.py",
    "integrations/torchtitan": "tests/integrations/test_torchtitan.py",
    "integrations/transformers": "tests/integrations/test_transformers.py",
    "integrations/wandb": "tests/integrations/test_observers.py",
    # Parts of one step, tested through the step.
    "loading/arrays": "tests/unit/loading/test_reader.py",
    "loading/components": "tests/behaviour/test_strictness.py tests/unit/manager/test_manager.py",
    "loading/filling": "tests/behaviour/test_unreadable.py tests/gpu/test_cuda_read.py",
    "loading/io": "tests/unit/loading/test_read.py tests/unit/loading/test_reader.py",
    "loading/match": "tests/behaviour/test_strictness.py tests/behaviour/test_odd_optimizers.py "
    "tests/behaviour/test_subclasses.py tests/behaviour/test_per_rank_models.py",
    "loading/restore": "tests/behaviour/test_strictness.py tests/behaviour/test_values_before_tensors.py",
    "manager/functions": "tests/unit/manager/test_arguments.py tests/behaviour/test_life_in_one_process.py",
    "plugins/class_loading": "tests/unit/plugins/test_protocol.py",
    # The two sides of an agreement, tested together.
    "ranks/broadcast": "tests/unit/ranks/test_store.py tests/unit/manager/test_schedule.py",
    "ranks/follower": "tests/unit/ranks/test_store.py",
    "ranks/leader": "tests/unit/ranks/test_store.py",
    "ranks/messages": "tests/unit/ranks/test_store.py",
    "runs/checkpoint": "tests/unit/manager/test_manager.py tests/behaviour/test_odd_manifests.py",
    "runs/claims": "tests/unit/runs/test_lease.py",
    "runs/composing": "tests/unit/manager/test_triggers.py tests/unit/runs/test_retention_policies.py",
    "runs/doctor": "tests/unit/cli/test_doctor.py",
    "runs/orphans": "tests/unit/runs/test_lease.py tests/distributed/test_life_under_torchrun.py",
    "runs/report": "tests/unit/manager/test_manager.py",
    "runs/verify": "tests/unit/cli/test_verify.py tests/security/test_every_byte.py",
    # A save as a whole, in one process and on several ranks.
    "saving/agreement": "tests/distributed/test_async_ranks.py tests/distributed/test_disagreement.py",
    "saving/async_saver": "tests/behaviour/test_async.py tests/distributed/test_async_ranks.py",
    "saving/background": "tests/behaviour/test_async.py tests/distributed/test_async_ranks.py",
    "saving/capture": "tests/unit/state/test_structure_cache.py tests/distributed/test_parallel.py",
    "saving/commit": "tests/crash/test_after_the_manifest.py tests/crash/test_crash_points.py",
    "saving/committed_steps": "tests/behaviour/test_lineage.py tests/behaviour/test_removed_steps.py",
    "saving/completion": "tests/behaviour/test_lineage.py",
    "saving/facts": "tests/behaviour/test_resave_components.py tests/crash/test_crash_points.py",
    "saving/part_saver": "tests/behaviour/test_resave_components.py tests/distributed/test_resave_components.py",
    "saving/pipeline": "tests/behaviour/test_async.py tests/behaviour/test_life_in_one_process.py",
    "saving/sync_saver": "tests/crash/test_crash_points.py tests/distributed/test_failures.py",
    "saving/take_over": "tests/behaviour/test_resave_components.py tests/crash/test_resave_crash_points.py",
    "saving/writer/launch": "tests/unit/saving/writer/test_client.py",
    "saving/writer/process": "tests/unit/saving/writer/test_client.py tests/distributed/test_life_under_torchrun.py",
    # What live objects are, found out by saving and restoring them.
    "state/devices/cuda_digest": "tests/unit/loading/test_gpu_digest.py tests/gpu/test_digesting_gpu.py",
    "state/frozen": "tests/behaviour/test_odd_modules.py tests/behaviour/test_subclasses.py",
    "state/modules": "tests/behaviour/test_odd_modules.py",
    "state/state_dicts": "tests/behaviour/test_odd_modules.py tests/behaviour/test_odd_optimizers.py",
    "state/tensors": "tests/behaviour/test_subclasses.py tests/distributed/test_sharded.py",
    # Parts of the local storage, tested through it and by the contract of every storage.
    "storage/local/advice": "tests/unit/storage/local/test_local.py",
    "storage/local/disk": "tests/unit/storage/local/test_local.py",
    "storage/local/folders": "tests/unit/storage/local/test_local.py",
    "storage/local/page_cache": "tests/unit/storage/local/test_bypass.py",
    "storage/local/publish": "tests/unit/storage/local/test_local.py",
    "storage/local/source": "tests/unit/storage/local/test_local.py",
    # What is shipped to users for their tests, used as they use it.
    "testing/exact_resume": "tests/distributed/test_assert_exact_resume.py",
    "testing/hostile": "tests/security/test_hostile_checkpoints.py",
    "testing/power_model": "tests/unit/testing/test_power.py",
    "testing/processes": "tests/distributed/test_run_ranks.py",
    "testing/simulation": "tests/unit/ranks/test_store.py",
    "testing/tied": "tests/distributed/test_run_ranks.py",
}


def test_every_file_of_unit_tests_names_a_module() -> None:
    assert without_module(SOURCE, UNIT) == []


def test_every_module_with_logic_has_tests() -> None:
    assert without_test(SOURCE, UNIT, ELSEWHERE) == []


def test_tests_that_are_elsewhere_are_there() -> None:
    assert outdated(SOURCE, UNIT, ELSEWHERE, ROOT) == []


# The checks themselves


@pytest.fixture
def house(tmp_path: Path) -> tuple[Path, Path]:
    """A package of three modules with logic, one of records, and tests that mirror it."""
    files = {
        "house/__init__.py": "",
        "house/room/__init__.py": "",
        "house/room/door.py": "def open(key):\n    return key if key else None\n",
        "house/room/lock/__init__.py": "",
        "house/room/lock/bolt.py": "def slide(bolts):\n    for bolt in bolts:\n        bolt()\n",
        "house/room/records.py": "class Key:\n    teeth: int = 3\n",
        "house/cellar.py": "def dig(deep):\n    while deep:\n        deep -= 1\n",
        "unit/room/test_door.py": "",
        "unit/room/test_door_in_the_wind.py": "",
        "unit/room/test_lock.py": "",
        "behaviour/test_digging.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "house", tmp_path / "unit"


def test_a_mirror_passes(house: tuple[Path, Path]) -> None:
    elsewhere = {"cellar": "behaviour/test_digging.py"}
    assert without_module(*house) == []
    assert without_test(*house, elsewhere) == []
    assert outdated(*house, elsewhere, house[0].parent) == []


@pytest.mark.parametrize(
    "name", ["room/test_window.py", "test_door.py", "room/lock/test_door.py", "attic/test_door.py"]
)
def test_a_test_file_without_a_module_is_found(house: tuple[Path, Path], name: str) -> None:
    (house[1] / name).parent.mkdir(exist_ok=True)
    (house[1] / name).touch()
    assert without_module(*house) == [name]


def test_a_module_without_a_test_is_found(house: tuple[Path, Path]) -> None:
    assert without_test(*house, {}) == ["cellar"]
    (house[1] / "room" / "test_lock.py").unlink()
    assert without_test(*house, {}) == ["cellar", "room/lock/bolt"]
    assert without_test(*house, {"cellar": "", "room/lock": ""}) == []


def test_an_entry_that_is_outdated_is_found(house: tuple[Path, Path]) -> None:
    elsewhere = {
        "attic": "behaviour/test_digging.py",
        "room/door": "behaviour/test_digging.py",
        "cellar": "behaviour/test_digging.py behaviour/test_filling.py",
    }
    assert outdated(*house, elsewhere, house[0].parent) == [
        "attic: no such module",
        "room/door: has a test file of its own",
        "cellar: behaviour/test_filling.py does not exist",
    ]


@pytest.mark.parametrize(
    ("text", "logic"),
    [
        ("NAMES = ('a', 'b')\n\n\nclass Key:\n    teeth: int = 3\n", False),
        ("def first(values):\n    return values[0]\n", False),
        ("def first(values):\n    return values[0] if values else None\n", True),
        ("def doubled(values):\n    return [2 * value for value in values]\n", True),
        ("def either(a, b):\n    return a or b\n", True),
    ],
)
def test_a_module_that_decides_something_has_logic(tmp_path: Path, text: str, logic: bool) -> None:
    (tmp_path / "module.py").write_text(text)
    assert has_logic(tmp_path / "module.py") is logic
