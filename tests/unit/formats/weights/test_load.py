"""Weights of other files into a model: names, types, shapes, ties, models without memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.errors import CorruptCheckpointError, StateMismatchError, UsageError
from holdfast.loading.reader import CheckpointReader


class Net(nn.Module):
    """Two layers, a norm with buffers, a head that is tied to the embedding, and a table that is not stored."""

    def __init__(self, width: int = 4, words: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up = nn.Linear(width, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0) + 1, persistent=False)


def net(seed: int, **options: int) -> Net:
    torch.manual_seed(seed)
    made = Net(**options)
    with torch.no_grad():
        made.norm.running_mean.normal_()
    return made


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: nn.Module, other: dict[str, torch.Tensor]) -> bool:
    found = one.state_dict()
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = net(1)
    path = tmp_path / "weights.safetensors"
    save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path, bits(model)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = net(1)
    with holdfast.CheckpointManager(
        tmp_path / "run", {"model": model, "ema": net(7)}, mode="sync", config={"width": 4, "words": 6}
    ) as manager:
        manager.save(3)
    return tmp_path / "run", bits(model)


def test_a_safetensors_file_fills_a_model(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = saved
    model = net(2)
    report = holdfast.load_weights(model, path)
    assert same(model, expected)
    assert (report.format, report.complete, set(report.loaded)) == ("safetensors", True, set(expected))
    assert model.head.weight is model.embed.weight


def test_a_run_a_selector_and_a_checkpoint_fill_a_model(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = run
    for source in (
        path,
        f"{path}@latest",
        f"{path}@3",
        holdfast.resolve(path),
        path / "step-000000003",
        path / "latest",
    ):
        model = net(2)
        assert holdfast.load_weights(model, source).format == "holdfast"
        assert same(model, expected), source


def test_another_component_is_loaded_by_its_name(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = net(2)
    holdfast.load_weights(model, run[0], component="ema")
    assert same(model, bits(net(7)))
    with pytest.raises(UsageError, match="nothing at 'emma'"):
        holdfast.load_weights(model, run[0], component="emma")


def test_a_flipped_bit_is_found_while_weights_are_loaded(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    (chunk,) = CheckpointReader(holdfast.resolve(run[0])).leaf("model.up.weight").record.chunks
    file = run[0] / "step-000000003" / chunk.file
    data = bytearray(file.read_bytes())
    data[chunk.start] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="partly filled"):
        holdfast.load_weights(net(2), run[0])


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed_and_reported(tmp_path: Path, front: str) -> None:
    expected = bits(net(1))
    save_file({front + name: value for name, value in expected.items()}, tmp_path / "file")
    model = net(2)
    report = holdfast.load_weights(model, tmp_path / "file")
    assert same(model, expected)
    assert any("removed" in change for change in report.renamed)


def test_a_prefix_that_the_model_has_is_added(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = net(2)

    expected = bits(net(1))
    save_file(expected, tmp_path / "file")
    model = Wrapped()
    report = holdfast.load_weights(model, tmp_path / "file")
    assert same(model.model, expected)
    assert report.renamed == (f"'model.' added to {len(expected)} names",)


@pytest.mark.parametrize("wrapped", [nn.DataParallel, torch.compile])
def test_a_wrapped_model_takes_plain_names(saved: tuple[Path, dict[str, torch.Tensor]], wrapped: Any) -> None:
    model = net(2)
    holdfast.load_weights(wrapped(model), saved[0])
    assert same(model, saved[1])


def test_names_follow_a_mapping_patterns_or_a_function(tmp_path: Path) -> None:
    expected = bits(net(1))
    save_file({name.replace("up.", "old.layer."): value for name, value in expected.items()}, tmp_path / "file")
    ways: list[Any] = [
        {"old.layer.weight": "up.weight", "old.layer.bias": "up.bias"},
        {"old.layer.*": "up.*"},
        [(r"^old\.layer\.", "up.")],
        lambda name: name.replace("old.layer.", "up."),
    ]
    for rename in ways:
        model = net(2)
        report = holdfast.load_weights(model, tmp_path / "file", rename=rename)
        assert same(model, expected)
        assert report.renamed == ("2 names changed by rename",)


def test_an_error_prints_the_rename_to_paste(tmp_path: Path) -> None:
    expected = bits(net(1))
    save_file({name.replace("up.", "old.layer."): value for name, value in expected.items()}, tmp_path / "file")
    model = net(2)
    before = bits(model)
    with pytest.raises(StateMismatchError) as caught:
        holdfast.load_weights(model, tmp_path / "file")
    assert same(model, before)
    assert "rename={'old.layer.*': 'up.*'}" in str(caught.value)
    assert caught.value.missing == ("up.weight", "up.bias")
    holdfast.load_weights(model, tmp_path / "file", rename={"old.layer.*": "up.*"})
    assert same(model, expected)


@pytest.mark.parametrize(
    "rename",
    [{"nothing.*": "up.*"}, [("^nothing", "up")], {"up.weight": "up.bias"}, lambda name: "one", 5, [("(", "x")]],
    ids=["mapping that matches nothing", "pattern", "two become one", "all become one", "a number", "no pattern"],
)
def test_a_rename_that_cannot_be_meant_is_refused(saved: tuple[Path, Any], rename: Any) -> None:
    with pytest.raises(UsageError, match="rename"):
        holdfast.load_weights(net(2), saved[0], rename=rename)


def test_a_rename_to_none_leaves_a_tensor_out(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = net(2)
    before = model.up.weight.clone()
    with pytest.raises(StateMismatchError, match=r"up\.weight"):
        holdfast.load_weights(model, saved[0], rename=lambda name: None if name == "up.weight" else name)
    report = holdfast.load_weights(
        model, saved[0], rename=lambda name: None if name == "up.weight" else name, exclude=["up.weight"]
    )
    assert torch.equal(model.up.weight, before)
    assert report.excluded == ("up.weight",)


def test_missing_and_unexpected_names_are_errors_and_listed_on_request(tmp_path: Path) -> None:
    expected = bits(net(1))
    stored = {name: value for name, value in expected.items() if not name.startswith("norm.")}
    save_file({**stored, "more": torch.ones(2)}, tmp_path / "file")
    model = net(2)
    before = bits(model)
    with pytest.raises(StateMismatchError, match=r"exclude=\['norm.weight'"):
        holdfast.load_weights(model, tmp_path / "file")
    assert same(model, before)
    report = holdfast.load_weights(model, tmp_path / "file", strict=False)
    assert report.unexpected == ("more",)
    assert set(report.missing) == {name for name in expected if name.startswith("norm.")}
    assert torch.equal(model.up.weight, expected["up.weight"])
    assert torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_nothing_in_common_is_an_error_in_every_strictness(tmp_path: Path) -> None:
    save_file({"other": torch.ones(2)}, tmp_path / "file")
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match="nothing in common"):
            holdfast.load_weights(net(2), tmp_path / "file", strict=strict)


def test_another_shape_is_an_error_in_every_strictness_unless_excluded(saved: tuple[Path, Any]) -> None:
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=r"up.weight: \[8, 4\] in the source, \[8, 5\] in the model"):
            holdfast.load_weights(net(2, width=5), saved[0], strict=strict)
    wider = net(2, words=9)
    report = holdfast.load_weights(wider, saved[0], exclude=["embed.weight", "head.weight"])
    assert set(report.excluded) == {"embed.weight", "head.weight"}
    assert torch.equal(wider.up.weight, saved[1]["up.weight"])


def test_excluding_one_of_two_tied_names_excludes_both(saved: tuple[Path, Any]) -> None:
    model = net(2)
    before = model.embed.weight.clone()
    report = holdfast.load_weights(model, saved[0], exclude=["head.*"])
    assert torch.equal(model.embed.weight, before)
    assert set(report.excluded) == {"embed.weight", "head.weight"}


def test_another_floating_type_needs_cast_and_integers_never_are(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = net(2).to(torch.bfloat16)
    with pytest.raises(StateMismatchError, match="cast=True"):
        holdfast.load_weights(model, saved[0])
    report = holdfast.load_weights(model, saved[0], cast=True)
    assert torch.equal(model.up.weight, saved[1]["up.weight"].to(torch.bfloat16))
    assert "up.weight" in report.cast
    model.norm.num_batches_tracked = model.norm.num_batches_tracked.to(torch.float32)
    with pytest.raises(StateMismatchError, match="num_batches_tracked: int64"):
        holdfast.load_weights(model, saved[0], cast=True)


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    expected = bits(net(1))
    for left_out in ("head.weight", "embed.weight"):
        save_file({name: value for name, value in expected.items() if name != left_out}, tmp_path / left_out)
        model = net(2)
        holdfast.load_weights(model, tmp_path / left_out)
        assert same(model, expected)


def test_tied_tensors_that_differ_in_the_source_are_an_error(tmp_path: Path) -> None:
    expected = bits(net(1))
    save_file({**expected, "head.weight": expected["head.weight"] + 1}, tmp_path / "file")
    model = net(2)
    before = bits(model)
    with pytest.raises(StateMismatchError, match="is tied to"):
        holdfast.load_weights(model, tmp_path / "file")
    assert same(model, before)


def test_a_model_on_the_meta_device_gets_memory_and_stays_tied(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(StateMismatchError, match="table"):
        holdfast.load_weights(model, saved[0])
    assert model.up.weight.is_meta
    model.table = torch.zeros(3)
    holdfast.load_weights(model, saved[0])
    assert same(model, saved[1])
    assert model.head.weight is model.embed.weight
    assert model.up.weight.requires_grad


def test_a_model_is_built_from_the_stored_configuration(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    seen = []

    def factory(config: Any) -> nn.Module:
        made = Net(**config)
        seen.extend(parameter.is_meta for parameter in made.parameters())
        return made

    model, config = holdfast.build_model(run[0], factory)
    assert all(seen)
    assert config == {"width": 4, "words": 6}
    assert same(model, run[1])
    assert torch.equal(model.table, torch.arange(3.0) + 1), "what is not stored is as the factory makes it"
    assert model.head.weight is model.embed.weight
    assert not any(parameter.is_meta for parameter in Net().parameters()), "only while the factory runs"


def test_a_model_cannot_be_built_without_a_configuration(saved: tuple[Path, Any]) -> None:
    with pytest.raises(UsageError, match="no configuration"):
        holdfast.build_model(saved[0], lambda config: net(1))


def test_extra_states_are_loaded_by_the_modules_own_hook(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = Counting(2, 2)
    model.count = 5
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, mode="sync") as manager:
        manager.save(0)
    other = Counting(2, 2)
    holdfast.load_weights(other, tmp_path / "run")
    assert other.count == 5
    assert torch.equal(other.weight, model.weight)


def test_the_memory_of_the_model_is_filled_in_place(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    holdfast.load_weights(model, saved[0])
    assert places == {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight


def test_what_is_no_source_or_no_model_is_said(saved: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fills a torch"):
        holdfast.load_weights({}, saved[0])  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        holdfast.load_weights(net(1), tmp_path / "nothing")
    with pytest.raises(UsageError, match="exclude"):
        holdfast.load_weights(net(1), saved[0], exclude="up.*")
    with pytest.raises(UsageError, match="not a int"):
        holdfast.load_weights(net(1), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"strict": False}, {"exclude": ["norm.*"]}], ids=["missing", "excluded"])
def test_no_memory_as_it_happens_to_be_becomes_a_weight(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = bits(net(1))
    save_file({name: value for name, value in expected.items() if not name.startswith("norm.")}, tmp_path / "file")
    with torch.device("meta"):
        model = Net()
    model.table = torch.zeros(3)
    with pytest.raises(StateMismatchError, match=r"norm\.weight.*no weights are loaded into it"):
        holdfast.load_weights(model, tmp_path / "file", **options)
    assert model.up.weight.is_meta
    if "strict" in options:
        with pytest.raises(UsageError, match="no configuration"):
            holdfast.build_model(tmp_path / "file", lambda config: net(1), strict=False)


def test_a_model_cannot_be_built_with_a_layer_that_the_source_lacks(run: tuple[Path, Any]) -> None:
    class Larger(Net):
        def __init__(self, **config: Any) -> None:
            super().__init__(**config)
            self.more = nn.Linear(2, 2)

    with pytest.raises(StateMismatchError, match="more"):
        holdfast.build_model(run[0], lambda config: Larger(**config), strict=False)


def test_a_factory_that_uses_the_content_of_a_parameter_is_told_what_to_do(run: tuple[Path, Any]) -> None:
    class Scaled(Net):
        def __init__(self, **config: Any) -> None:
            super().__init__(**config)
            self.scale = self.up.weight.abs().max().item()

    with pytest.raises(UsageError, match=r"load_weights\(\)"):
        holdfast.build_model(run[0], lambda config: Scaled(**config))


def test_eight_bit_floats_are_never_cast_and_advice_is_not_what_was_done(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "bias": torch.ones(2)}, tmp_path / "file")
    for cast in (False, True):
        with pytest.raises(StateMismatchError, match="float8_e4m3fn") as caught:
            holdfast.load_weights(nn.Linear(2, 2), tmp_path / "file", cast=cast)
        assert "cast=True" not in str(caught.value)


def test_a_glob_of_exclude_that_matches_nothing_is_an_error(saved: tuple[Path, Any]) -> None:
    with pytest.raises(UsageError, match=r"'typo\.\*', which no name of the model matches"):
        holdfast.load_weights(net(2), saved[0], exclude=["up.*", "typo.*"])


def test_an_averaged_model_is_loaded_beside_its_count(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net(1))
    save_file({name: value.clone() for name, value in averaged.state_dict().items()}, tmp_path / "file")
    model = net(2)
    with pytest.raises(StateMismatchError, match="n_averaged"):
        holdfast.load_weights(model, tmp_path / "file")
    report = holdfast.load_weights(model, tmp_path / "file", strict=False)
    assert report.unexpected == ("n_averaged",)
    assert same(model, bits(net(1)))


def test_tied_tensors_without_weights_are_not_left_as_memory_happens_to_be(tmp_path: Path) -> None:
    expected = bits(net(1))
    tied = ("embed.weight", "head.weight")
    save_file({name: value for name, value in expected.items() if name not in tied}, tmp_path / "file")
    with torch.device("meta"):
        model = Net()
    model.table = torch.zeros(3)
    model.head.weight = model.embed.weight
    with pytest.raises(StateMismatchError, match=r"embed\.weight.*no weights are loaded into it"):
        holdfast.load_weights(model, tmp_path / "file", strict=False)
