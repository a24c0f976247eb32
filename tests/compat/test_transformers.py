"""Real models of transformers and adapters of peft: trained on two ranks under Holdfast, exported, loaded by their own
libraries, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import UsageError
from holdfast.formats.exporting.export import export
from holdfast.formats.hub.peft import PeftSource
from holdfast.testing import values
from tests.ranks import run_ranks
from tests.sizes import if_deep

pytest.importorskip("transformers")
pytest.importorskip("peft")

VOCABULARY = 96
TOKENS = torch.arange(24).view(2, 12)


def build(kind: str) -> Any:
    """Return a small model with weights that differ from those of another build."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **common))
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=kind == "tied llama", **sizes, **common))


def make_tokenizer(folder: Path) -> Path:
    """Make a tokenizer of whole words, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(rank: int, folder: Path, kind: str) -> dict[str, torch.Tensor] | None:
    torch.manual_seed(3)
    model = build(kind)
    config = model.config.to_dict()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.transformer.h if kind == "gpt2" else model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.CheckpointManager(folder / "run", state, config=config, assets=[folder / "tokenizer"]) as manager:
        manager.save(2, wait=True)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["tied llama", *if_deep("llama", "gpt2")])
def test_a_model_of_two_ranks_is_loaded_by_from_pretrained_with_the_same_logits(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tokenizer(tmp_path / "tokenizer")
    trained = values(run_ranks(2, train_sharded, tmp_path, kind))[0]
    reference = build(kind)
    fresh = logits_of(reference)
    reference.load_state_dict(trained)
    export(tmp_path / "run", tmp_path / "out", format="hf", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is type(reference)
    assert torch.equal(logits_of(loaded), logits_of(reference))
    assert not torch.equal(logits_of(reference), fresh)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w7")["input_ids"] == [5, 7]


def test_a_model_that_was_converted_is_loaded_in_its_new_type(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build("llama")
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, config=model.config.to_dict()) as manager:
        manager.save(1, wait=True)
    export(tmp_path / "run", tmp_path / "out", format="hf", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    wanted = model.bfloat16().state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


# Adapters


def adapted(base: Any, **options: Any) -> Any:
    """Return the base with an adapter whose matrices are not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def train_adapter(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = adapted(AutoModelForCausalLM.from_pretrained(folder / "base"), task_type="CAUSAL_LM")
    config = {"peft": model.peft_config["default"].to_dict(), "lr": 0.01}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    train(model, optimizer)
    with holdfast.CheckpointManager(folder / "run", {"model": holdfast.Trainable(model)}, config=config) as manager:
        manager.save(2, wait=True)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def test_an_adapter_of_two_ranks_is_loaded_by_peft_with_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    build("llama").save_pretrained(tmp_path / "base")
    trained = values(run_ranks(2, train_adapter, tmp_path))[0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits_of(base)
    reference = adapted(base, task_type="CAUSAL_LM")
    reference.load_state_dict(trained)
    export(tmp_path / "run", tmp_path / "out", format="peft")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    assert torch.equal(logits_of(loaded), logits_of(reference))
    assert not torch.equal(logits_of(loaded), plain)
    with pytest.raises(UsageError, match="Trainable"):
        export(tmp_path / "run", tmp_path / "whole", format="safetensors")


def save_adapter(folder: Path, model: Any, state: Any, **options: Any) -> Path:
    config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=_listed))
    with holdfast.CheckpointManager(folder / "run", {"model": state}, config=config, mode="sync", **options) as manager:
        manager.save(1)
    return folder / "run"


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value.value


ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "a head that is saved too": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "trainable"])
def test_an_adapter_has_the_names_that_peft_gives_it_and_reads_back(
    tmp_path: Path, options: dict[str, Any], whole: bool
) -> None:
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    torch.manual_seed(1)
    model = adapted(build("llama"), **options)
    run = save_adapter(tmp_path, model, model if whole else holdfast.Trainable(model))
    export(run, tmp_path / "out", format="peft")
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    with PeftSource(tmp_path / "out") as source:
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        assert set(source.tree) == trained
    torch.manual_seed(1)
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path / "out")
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "LoKrConfig"])
def test_an_adapter_of_another_type_has_the_names_that_peft_gives_it(tmp_path: Path, kind: str) -> None:
    import peft
    from safetensors.torch import load_file

    options = {"target_modules": ["q_proj", "down_proj"]}
    if kind == "IA3Config":
        options["feedforward_modules"] = ["down_proj"]
    model = peft.get_peft_model(build("llama"), getattr(peft, kind)(**options))
    run = save_adapter(tmp_path, model, holdfast.Trainable(model))
    export(run, tmp_path / "out", format="peft")
    wanted = peft.get_peft_model_state_dict(model)
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == wanted.keys()
    with PeftSource(tmp_path / "out") as source:
        assert set(source.tree) == {name for name, one in model.named_parameters() if one.requires_grad}


def test_what_peft_has_no_place_for_is_refused(tmp_path: Path) -> None:
    model = adapted(build("llama"))
    model.base_model.model.model.norm.weight.requires_grad = True
    run = save_adapter(tmp_path, model, holdfast.Trainable(model))
    with pytest.raises(UsageError, match=r"trained.*norm\.weight"):
        export(run, tmp_path / "out", format="peft")
    export(run, tmp_path / "out", format="peft", rename={"*.norm.weight": None})


def test_one_of_several_adapters_is_chosen_by_leaving_out_the_others(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = adapted(build("llama"))
    model.add_adapter("second", model.peft_config["default"])
    run = save_adapter(tmp_path, model, model)
    with pytest.raises(UsageError, match=r"default, second"):
        export(run, tmp_path / "out", format="peft")
    export(run, tmp_path / "out", format="peft", rename={"*.second.*": None})
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")


def test_a_model_without_an_adapter_and_a_checkpoint_without_its_config_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    for name, config, message in (("a", {"lr": 1}, "peft_type"), ("b", {"peft_type": "LORA"}, "no parameters")):
        with holdfast.CheckpointManager(tmp_path / name, {"model": model}, config=config) as manager:
            manager.save(1, wait=True)
        with pytest.raises(UsageError, match=message):
            export(tmp_path / name, tmp_path / "out", format="peft")
    with holdfast.CheckpointManager(tmp_path / "c", {"model": model}, config={"peft_type": "P_TUNING"}) as manager:
        manager.save(1, wait=True)
    with pytest.raises(UsageError, match=r"P_TUNING.*save_pretrained"):
        export(tmp_path / "c", tmp_path / "out", format="peft")
