"""A restore into a model whose layers have other names or another floating type, strictly, and with nothing silent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CorruptCheckpointError, LoadStrategy, StateMismatchError, UsageError
from tests.sizes import some


class Net(torch.nn.Module):
    """Linear layers by name, a buffer of integers and one of floats."""

    def __init__(self, names: str, seed: int = 0, wide: Mapping[str, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in names.split():
            self.add_module(name, torch.nn.Linear(3, (wide or {}).get(name, 3)))
        self.register_buffer("count", torch.randint(100, (4,)))
        self.register_buffer("mean", torch.randn(5))


def trained(model: torch.nn.Module, kind: Any = torch.optim.AdamW, steps: int = 2) -> dict[str, Any]:
    """The model and an optimizer with moments of their own."""
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def saved(run: Path, state: dict[str, Any], step: int = 5) -> None:
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        manager.save(step)


def restored(run: Path, state: dict[str, Any], **options: Any) -> holdfast.RestoreResult:
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        return manager.restore(strategy=LoadStrategy(**options))


def content(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a model, and of the state of its optimizer by the parameters' names."""
    found = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    if "optimizer" in state:
        for name, parameter in state["model"].named_parameters():
            for key, value in state["optimizer"].state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value.clone()
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def refused(run: Path, state: dict[str, Any], kind: type[Exception] = StateMismatchError, **options: Any) -> str:
    """The error of a restore that must leave everything as it was."""
    before = content(state)
    with pytest.raises(kind) as caught:
        restored(run, state, **options)
    assert same(content(state), before)
    return str(caught.value)


def with_name(found: Mapping[str, torch.Tensor], change: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {change(name): tensor for name, tensor in found.items()}


# Renamed


FORMS: dict[str, Any] = {
    "star": {"old.*": "new.*"},
    "whole names": {"old.weight": "new.weight", "old.bias": "new.bias"},
    "patterns": [(r"^old\.", "new.")],
    "function": lambda name: name.replace("old.", "new."),
    "by component": {"model": {"old.*": "new.*"}},
    "function by component": {"model": lambda name: name.replace("old.", "new.")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_renamed_layer_takes_its_weights_and_its_moments(tmp_path: Path, form: str, steps: int) -> None:
    first = trained(Net("a old"))
    saved(tmp_path, first)
    second = trained(Net("a new", seed=9), steps=steps)
    result = restored(tmp_path, second, rename=FORMS[form])
    assert same(content(second), with_name(content(first), lambda name: name.replace("old.", "new.")))
    assert result.resumed
    assert set(result.renamed) == {
        "model.old.weight: is model.new.weight now",
        "model.old.bias: is model.new.bias now",
        "optimizer.state.old.weight: is optimizer.state.new.weight now",
        "optimizer.state.old.bias: is optimizer.state.new.bias now",
    }
    assert (result.missing, result.skipped, result.accepted, result.cast) == ((), (), (), ())


def test_two_layers_that_change_places_do_so_in_model_and_optimizer(tmp_path: Path) -> None:
    first = trained(Net("a b"))
    saved(tmp_path, first)
    second = trained(Net("a b", seed=9))
    restored(tmp_path, second, rename={"a.*": "b.*", "b.*": "a.*"})
    swap = {"a": "b", "b": "a"}
    expected = with_name(content(first), lambda name: re.sub(r"^[ab](?=\.)", lambda found: swap[found[0]], name))
    assert same(content(second), expected)


def test_what_is_saved_after_a_rename_has_the_new_names_and_comes_back_by_them(tmp_path: Path) -> None:
    saved(tmp_path, trained(Net("a old")))
    second = trained(Net("a new", seed=9))
    with holdfast.CheckpointManager(tmp_path, second, mode="sync") as manager:
        assert manager.restore(strategy=LoadStrategy(rename={"old.*": "new.*"})).next_step == 6
        manager.save(6)
    names = {tensor.name for tensor in holdfast.resolve(tmp_path).manifest.tensors}
    assert "model.new.weight" in names
    assert not [name for name in names if "old" in name]
    third = trained(Net("a new", seed=10))
    assert restored(tmp_path, third).renamed == ()
    assert same(content(third), content(second))


def test_an_optimizer_that_is_restored_alone_follows_the_names_of_its_model(tmp_path: Path) -> None:
    first = trained(Net("a old"))
    saved(tmp_path, first)
    second = trained(Net("a new", seed=9), steps=0)
    restored(tmp_path, second, only=("optimizer",), rename={"model": {"old.*": "new.*"}})
    moments = {name: tensor for name, tensor in content(second).items() if "/" in name}
    expected = with_name(content(first), lambda name: name.replace("old.", "new."))
    assert same(moments, {name: tensor for name, tensor in expected.items() if "/" in name})


def two_models(names: str, seed: int) -> dict[str, Any]:
    models = {"model": Net(names, seed), "ema": Net(names, seed + 1)}
    optimizer = torch.optim.AdamW([*models["model"].parameters(), *models["ema"].parameters()])
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {**models, "optimizer": optimizer}


@pytest.mark.parametrize("by_component", [False, True])
def test_two_models_and_the_optimizer_over_both_are_renamed(tmp_path: Path, by_component: bool) -> None:
    first, second = two_models("a old", 1), two_models("a new", 5)
    saved(tmp_path, first)
    rule = {"old.*": "new.*"}
    restored(tmp_path, second, rename={"model": rule, "ema": rule} if by_component else rule)
    for name in ("model", "ema"):
        one, other = ({**state, "model": state[name]} for state in (first, second))
        assert same(content(other), with_name(content(one), lambda key: key.replace("old.", "new.")))


def test_a_rename_of_one_model_leaves_the_names_of_the_other(tmp_path: Path) -> None:
    saved(tmp_path, {"model": Net("old", 1), "ema": Net("old", 2)})
    state = {"model": Net("new", 3), "ema": Net("old", 4)}
    result = restored(tmp_path, state, rename={"model": {"old.*": "new.*"}})
    assert all(text.startswith("model.") for text in result.renamed)


def test_a_model_that_is_attached_later_takes_its_renamed_state(tmp_path: Path) -> None:
    first = {"model": Net("a", 1), "ema": Net("old", 2)}
    saved(tmp_path, first)
    late = Net("new", 3)
    with holdfast.CheckpointManager(tmp_path, {"model": Net("a", 4)}, mode="sync") as manager:
        manager.restore(strategy=LoadStrategy(rename={"ema": {"old.*": "new.*"}}))
        manager.save(6)  # carries the state of `ema` on as it was
        assert manager.attach("ema", late)
    assert torch.equal(late.new.weight, first["ema"].old.weight)
    names = {tensor.name for tensor in holdfast.resolve(tmp_path).manifest.tensors}
    assert "ema.old.weight" in names


# Removed, added and wider


@pytest.mark.parametrize("options", [{"rename": {"gone.*": None}}, {"exclude": ["*gone.*"]}, {"strict": False}])
def test_a_layer_that_was_removed_is_left_out_on_request(tmp_path: Path, options: dict[str, Any]) -> None:
    first = trained(Net("a gone"))
    saved(tmp_path, first)
    second = trained(Net("a", seed=9))
    refused(tmp_path, second)
    result = restored(tmp_path, second, **options)
    assert same(content(second), {name: one for name, one in content(first).items() if "gone" not in name})
    assert "gone" in str(result.renamed + result.skipped)


def test_a_layer_that_was_added_stays_as_it_is_in_model_and_optimizer(tmp_path: Path) -> None:
    first = trained(Net("a"))
    saved(tmp_path, first)
    second = trained(Net("a added", seed=9))
    before = content(second)
    refused(tmp_path, second)
    restored(tmp_path, second, exclude=["model.added.*", "optimizer.state.added.*"])
    kept = {name: tensor for name, tensor in before.items() if name.startswith("added")}
    assert same(content(second), content(first) | kept)


def test_a_wider_head_stays_as_it_is_beside_a_renamed_layer(tmp_path: Path) -> None:
    first = trained(Net("old head"))
    saved(tmp_path, first)
    second = trained(Net("new head", seed=9, wide={"head": 7}))
    before = content(second)
    rename = {"old.*": "new.*"}
    assert "model.head.weight: float32 [3, 3]" in refused(tmp_path, second, rename=rename)
    # A leaf that is renamed and does not fit is named as it is now, which is what `exclude` takes.
    swapped = refused(tmp_path, second, rename={"old.*": "head.*", "head.*": "new.*"})
    assert "model.head.weight: float32 [3, 3] in the checkpoint, float32 [7, 3] now" in swapped
    assert "optimizer.state.head.weight.exp_avg: [3, 3] in the checkpoint, for a parameter of [7, 3]" in swapped
    restored(tmp_path, second, rename=rename, exclude=["model.head.*", "optimizer.state.head.*"])
    expected = with_name(content(first), lambda name: name.replace("old.", "new."))
    kept = {name: tensor for name, tensor in before.items() if name.startswith("head")}
    assert same(content(second), expected | kept)


def test_exclude_is_about_the_new_names(tmp_path: Path) -> None:
    saved(tmp_path, trained(Net("a old")))
    rename = {"old.*": "new.*"}
    second = trained(Net("a new", seed=9))
    before = content(second)
    assert "matches no leaf" in refused(tmp_path, second, UsageError, rename=rename, exclude=["model.old.*"])
    restored(tmp_path, second, rename=rename, exclude=["model.new.*", "optimizer.state.new.*"])
    after = content(second)
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("new."))
    assert not torch.equal(after["a.weight"], before["a.weight"])


# Errors of a rename


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("rename", "kind", "text"),
    [
        ({"nothing.*": "x.*"}, UsageError, "'nothing.*' matches no leaf"),
        ({"old.*": "new.*", "nothing": "x"}, UsageError, "'nothing' matches no leaf"),
        ([("^old", "new"), ("nothing", "x")], UsageError, "'nothing' matches no leaf"),
        ({"model": {"nothing.*": "x.*"}}, UsageError, "'nothing.*' matches no leaf of 'model'"),
        ({"old.weight": "a.weight", "old.bias": "new.bias"}, UsageError, "'a.weight' of both"),
        ({"other": {"old.*": "new.*"}}, UsageError, "'other', which is not there"),
        ({"optimizer": {"old.*": "new.*"}}, UsageError, "'optimizer', which is no model"),
        (lambda name: {}[name], UsageError, "rename raised KeyError"),
        (lambda name: f"x.{name}", StateMismatchError, "model.x.old.weight"),
        ({"*": None}, StateMismatchError, "model"),
    ],
)
def test_a_rename_that_cannot_be_meant_changes_nothing(
    tmp_path: Path, strict: bool, rename: Any, kind: Any, text: str
) -> None:
    saved(tmp_path, trained(Net("a old")))
    assert text in refused(tmp_path, trained(Net("a new", seed=9)), kind, rename=rename, strict=strict)


def test_a_rename_that_brings_only_a_part_together_is_still_strict(tmp_path: Path) -> None:
    saved(tmp_path, trained(Net("a old")))
    state = trained(Net("a new", seed=9))
    text = refused(tmp_path, state, rename={"old.weight": "new.weight"})
    assert "model.new.bias" in text
    assert "model.old.bias" in text
    assert restored(tmp_path, state, rename={"old.weight": "new.weight"}, strict=False).missing


class Plain:
    """The state of a model as older versions stored it for each rank."""

    def __init__(self, inner: torch.nn.Module) -> None:
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


def test_a_model_that_takes_its_state_by_itself_is_not_renamed_in_vain(tmp_path: Path) -> None:
    saved(tmp_path, {"model": holdfast.PerRank(Plain(Net("a old")))})
    model = Net("a new", seed=9)
    before = content({"model": model})
    for rename in ({"old.*": "new.*"}, {"model": str.lower}):
        with pytest.raises(StateMismatchError, match="cannot be renamed"):
            restored(tmp_path, {"model": holdfast.PerRank(model)}, rename=rename)
    assert same(content({"model": model}), before)


def test_wrappers_in_names_are_no_exception_and_the_error_prints_the_rename(tmp_path: Path) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.module = inner

    first = trained(Wrapped(Net("a b")))
    saved(tmp_path, first)
    state = trained(Net("a b", seed=9))
    pasted(tmp_path, state, refused(tmp_path, state), "LoadStrategy(rename={'module.*': '*'})")
    assert same(content(state), with_name(content(first), lambda name: name.removeprefix("module.")))


def pasted(run: Path, state: dict[str, Any], error: str, expected: str) -> holdfast.RestoreResult:
    """Restore with what an error prints to paste."""
    found = re.search(r"to paste: strategy=(LoadStrategy\(.*\))$", error, re.MULTILINE)
    assert found is not None, error
    assert found[1] == expected
    strategy = eval(found[1], {"LoadStrategy": LoadStrategy})
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        return manager.restore(strategy=strategy)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (Net("a old"), Net("a new", 9), "rename={'old.*': 'new.*'}"),
        (Net("a gone"), Net("a", 9), "exclude=['model.gone.*', 'optimizer.state.gone.*']"),
        (Net("a"), Net("a added", 9), "exclude=['model.added.*', 'optimizer.state.added.*']"),
        (Net("a b c"), Net("a x y", 9), None),
        (Net("a head"), Net("a head", 9, wide={"head": 7}), "exclude=['model.head.*', 'optimizer.state.head.*']"),
        (Net("a"), Net("a", 9).bfloat16(), "cast=True"),
        (Net("a old"), Net("a new", 9).double(), "rename={'old.*': 'new.*'}"),
    ],
)
def test_what_an_error_prints_to_paste_lets_the_restore_through(
    tmp_path: Path, before: Net, now: Net, expected: str | None
) -> None:
    saved(tmp_path, trained(before))
    state = trained(now)
    error = refused(tmp_path, state)
    if expected is None:
        expected = "exclude=['model.x.*', 'model.y.*', 'model.b.*', 'model.c.*', " + (
            ", ".join(f"'optimizer.state.{name}.*'" for name in "xybc") + "]"
        )
    if now.mean.dtype == torch.float64:
        # The type shows only once the names fit.
        error = refused(tmp_path, state, rename={"old.*": "new.*"})
        assert error.endswith("to add to the LoadStrategy: cast=True")
        return
    assert pasted(tmp_path, state, error, f"LoadStrategy({expected})").resumed


# Another type


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    some(((*two, steps) for two in itertools.permutations(FLOATS, 2) for steps in (0, 1)), 8),
)
def test_every_floating_type_is_converted_to_every_other_with_its_moments(
    tmp_path: Path, before: torch.dtype, now: torch.dtype, steps: int
) -> None:
    first = trained(Net("a b").to(before))
    saved(tmp_path, first)
    second = trained(Net("a b", seed=9).to(now), steps=steps)
    error = refused(tmp_path, second)
    assert "cast=True converts it" in error
    result = restored(tmp_path, second, cast=True)
    expected = {
        # torch counts steps in float32, or in float64, and not in the type of the parameter.
        name: tensor if name.endswith("/step") or not tensor.is_floating_point() else tensor.to(now)
        for name, tensor in content(first).items()
    }
    found = content(second)
    assert same(
        {name: one for name, one in found.items() if not name.endswith("/step")},
        {name: one for name, one in expected.items() if not name.endswith("/step")},
    )
    assert all(float(found[name]) == 2.0 for name in found if name.endswith("/step"))
    was, is_now = (str(dtype).removeprefix("torch.") for dtype in (before, now))
    assert f"model.a.weight: {was} in the checkpoint, {is_now} now" in result.cast
    assert f"optimizer.state.a.weight.exp_avg: {was} in the checkpoint, {is_now} now" in result.cast
    assert not [text for text in result.cast if "count" in text]
    third = trained(Net("a b", seed=10).to(now), steps=0)
    saved(tmp_path, second, step=6)
    assert restored(tmp_path, third).cast == ()


def test_the_count_of_steps_is_never_kept_in_a_narrow_type(tmp_path: Path) -> None:
    first = trained(Net("a"))
    for state in first["optimizer"].state.values():
        state["step"].fill_(1001)
    saved(tmp_path, first)
    second = trained(Net("a", seed=9).bfloat16(), steps=0)
    restored(tmp_path, second, cast=True)
    assert {(float(state["step"]), state["step"].dtype) for state in second["optimizer"].state.values()} == {
        (1001.0, torch.float32)
    }


def test_moments_that_were_wider_than_their_parameter_stay_so(tmp_path: Path) -> None:
    first = trained(Net("a").bfloat16())
    for state in first["optimizer"].state.values():
        state["exp_avg"] = torch.randn_like(state["exp_avg"], dtype=torch.float32)
    saved(tmp_path, first)
    second = trained(Net("a", seed=9).half(), steps=0)
    restored(tmp_path, second, cast=True)
    for old, new in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(second["optimizer"].state[new]["exp_avg"], first["optimizer"].state[old]["exp_avg"])
        assert second["optimizer"].state[new]["exp_avg_sq"].dtype == torch.float16


def test_new_moments_of_a_renamed_parameter_have_its_type_as_those_of_any_other(tmp_path: Path) -> None:
    first = trained(Net("a old"))
    saved(tmp_path, first)
    second = trained(Net("a new", seed=9).bfloat16(), steps=0)
    restored(tmp_path, second, rename={"old.*": "new.*"}, cast=True)
    found = content(second)
    assert found["new.weight/exp_avg"].dtype == found["a.weight/exp_avg"].dtype == torch.bfloat16
    assert torch.equal(found["new.weight/exp_avg"], content(first)["old.weight/exp_avg"].bfloat16())


class Buffer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, dtype=torch.float32))
        self.register_buffer("value", torch.ones(4).to(dtype))


OTHERS = (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_float_of_sixteen_bits_or_more_is_never_converted(tmp_path: Path, other: torch.dtype) -> None:
    for before, now in ((other, torch.float32), (torch.float32, other)):
        run = tmp_path / str(before)
        saved(run, {"model": Buffer(before)})
        for cast in (True, False):
            with pytest.raises(StateMismatchError) as caught:
                restored(run, {"model": Buffer(now)}, cast=cast)
            assert "model.value" in str(caught.value)
            assert "cast=True" not in str(caught.value)


def test_another_shape_is_not_excused_by_a_cast(tmp_path: Path) -> None:
    saved(tmp_path, trained(Net("a")))
    text = refused(tmp_path, trained(Net("a", seed=9, wide={"a": 7}).double()), cast=True)
    assert "model.a.weight: float32 [3, 3] in the checkpoint, float64 [7, 3] now" in text


@pytest.mark.parametrize("wrapper", [dict, holdfast.PerRank])
def test_the_tensors_of_a_dict_are_converted_in_their_own_memory(tmp_path: Path, wrapper: Any) -> None:
    saved(tmp_path, {"model": Net("a"), "ema": wrapper({"w": torch.randn(6), "n": torch.arange(3)})})
    own = torch.zeros(6, dtype=torch.bfloat16)
    live = {"w": own, "n": torch.zeros(3, dtype=torch.int64)}
    state = {"model": Net("a", 9), "ema": holdfast.PerRank(live) if wrapper is holdfast.PerRank else live}
    with pytest.raises(
        StateMismatchError, match=r"\.w: float32 \[6\](.|\n)*to paste: strategy=LoadStrategy\(cast=True\)"
    ):
        restored(tmp_path, state)
    result = restored(tmp_path, state, cast=True)
    assert live["w"] is own
    assert own.any()
    assert [text.partition(".w")[2] for text in result.cast] == [": float32 in the checkpoint, bfloat16 now"]


def test_a_tied_tensor_is_renamed_and_converted_by_all_of_its_names(tmp_path: Path) -> None:
    def tied(names: str, seed: int) -> Net:
        model = Net(names, seed)
        first, second = names.split()
        getattr(model, second).weight = getattr(model, first).weight
        return model

    first = {"model": tied("a old", 1)}
    saved(tmp_path, first)
    second = {"model": tied("a new", 2).bfloat16()}
    second["model"].new.weight = second["model"].a.weight
    restored(tmp_path, second, rename={"old.*": "new.*"}, cast=True)
    assert second["model"].new.weight is second["model"].a.weight
    assert torch.equal(second["model"].new.weight, first["model"].a.weight.bfloat16())


@pytest.mark.parametrize("verify", ["full", "quick", "off"])
@pytest.mark.parametrize("shape", [(3_000_001,), (1, 3_000_001), (1500, 2001), (), (0, 3)])
def test_a_tensor_of_any_shape_is_converted(tmp_path: Path, shape: tuple[int, ...], verify: Any) -> None:
    first = torch.nn.Module()
    first.w = torch.nn.Parameter(torch.randn(shape))
    first.t = torch.nn.Parameter(torch.randn(*shape[::-1]).t() if len(shape) == 2 else torch.randn(shape))
    saved(tmp_path, {"model": first})
    second = torch.nn.Module()
    second.w = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    second.t = torch.nn.Parameter(torch.zeros_like(first.t, dtype=torch.float64))
    with holdfast.CheckpointManager(tmp_path, {"model": second}, mode="sync", verify=verify) as manager:
        manager.restore(strategy=LoadStrategy(cast=True))
    assert torch.equal(second.w, first.w.bfloat16())
    assert torch.equal(second.t, first.t.double())


@pytest.mark.guarantee("G3", "G7")
def test_damage_is_found_before_anything_is_converted_or_renamed(tmp_path: Path) -> None:
    saved(tmp_path, trained(Net("a old")))
    [file] = (tmp_path / "step-000000005").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    state = trained(Net("a new", seed=9).bfloat16())
    refused(tmp_path, state, CorruptCheckpointError, rename={"old.*": "new.*"}, cast=True)


# Every combination


ONLY = {"all": {}, "only": {"only": ("model",)}, "skip": {"skip": ("optimizer",)}}
RENAME: dict[str, dict[str, Any]] = {"none": {}, "rename": {"rename": {"old.*": "new.*"}}}
EXCLUDE: dict[str, dict[str, Any]] = {"none": {}, "exclude": {"exclude": ["model.head.*"]}}


@pytest.fixture(scope="module")
def run_of_the_matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("matrix")
    state = trained(Net("a old head"))
    saved(run, state)
    return run, state


@pytest.mark.parametrize("only", ONLY)
@pytest.mark.parametrize("exclude", EXCLUDE)
@pytest.mark.parametrize("rename", RENAME)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_every_combination_restores_exactly_what_it_allows_or_nothing(
    run_of_the_matrix: tuple[Path, dict[str, Any]], only: str, exclude: str, rename: str, cast: bool, strict: bool
) -> None:
    run, first = run_of_the_matrix
    second = trained(Net("a new head", seed=9).bfloat16())
    options = {**ONLY[only], **EXCLUDE[exclude], **RENAME[rename], "cast": cast, "strict": strict}
    if not cast or (strict and rename == "none"):
        refused(run, second, **options)
        return
    before = content(second)
    result = restored(run, second, **options)
    found = content(second)
    source = with_name(content(first), lambda name: name.replace("old.", "new.") if rename == "rename" else name)
    for name, tensor in found.items():
        taken = (only == "all" or "/" not in name) and not (exclude == "exclude" and name.startswith("head"))
        if "/" in name and name.startswith("head"):
            taken = only == "all"
        taken = taken and name in source
        expected = source[name].to(tensor.dtype) if taken else before[name]
        assert torch.equal(tensor, expected), name
    assert bool(result.renamed) == (rename == "rename")
    assert any(text.startswith("model.a.weight") for text in result.cast)
    assert bool(result.missing) == (rename == "none")
