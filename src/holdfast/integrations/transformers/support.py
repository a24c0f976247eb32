"""What the integration with the Trainer is tested with. A Trainer enters; an error leaves for everything else."""

from __future__ import annotations

from typing import Any

import holdfast

try:
    import accelerate  # noqa: F401
    import transformers
except ImportError as missing:
    raise ImportError(
        f"holdfast.integrations.transformers needs transformers and accelerate: {missing}; "
        "pip install 'holdfast[transformers]'"
    ) from missing

__all__ = ["OPTIONS", "check_options", "check_version", "refuse_unsupported"]

_TESTED, _NOT_TESTED = "5.22", "5.23"
# Options of the manager that TrainingArguments have no word for.
OPTIONS = frozenset(
    {"save", "keep", "mode", "verify", "timeout", "staging_limit_bytes", "links", "on_event", "observers", "replicas"}
)


def check_version(version: str = transformers.__version__) -> None:
    """Raise for a version of transformers whose private methods were not tried."""
    if not _numbers(_TESTED) <= _numbers(version) < _numbers(_NOT_TESTED):
        raise ImportError(
            f"holdfast.integrations.transformers is tested with transformers from {_TESTED} to before {_NOT_TESTED}, "
            f"and this is {version}; it overrides private methods of the Trainer, which change between versions: "
            f"pip install 'transformers>={_TESTED},<{_NOT_TESTED}'"
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


def check_options(options: dict[str, Any], strategy: object, arguments: Any) -> None:
    """Raise for an option that is not known, or that contradicts the TrainingArguments."""
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise holdfast.UsageError(
            f"checkpoint_options has no {unknown[0]!r:.100}",
            advice=f"it has {', '.join(sorted(OPTIONS | {'strategy'}))}; the run is output_dir",
        )
    if not isinstance(strategy, holdfast.LoadStrategy):
        raise holdfast.UsageError(f"the strategy of checkpoint_options is a LoadStrategy, not {strategy!r:.100}")
    if "keep" in options and arguments.save_total_limit is not None:
        raise holdfast.UsageError(
            "both save_total_limit and the option 'keep' say what stays", advice="leave one of them out"
        )


def refuse_unsupported(trainer: Any) -> None:
    """Raise for what is not tested, before any step is trained that could not be saved."""
    arguments, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    parallel = getattr(accelerator, "parallelism_config", None)
    sizes = [getattr(parallel, f"{name}_size", None) or 1 for name in ("tp", "cp", "sp")]
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP of XLA": trainer.is_fsdp_xla_enabled,
        "FSDP 1; set fsdp_config={'version': 2}": plugin is not None and plugin.fsdp_version != 2,
        "a model on several devices of one process (device_map)": trainer.is_model_parallel,
        "a model that was sharded while it was loaded": trainer.is_distributed_loading_by_transformers,
        "tensor, context or sequence parallelism": any(size > 1 for size in sizes),
        "save_on_each_node: all ranks write to one folder": arguments.save_on_each_node,
        "pushing checkpoints to the Hub; set hub_strategy='end'": arguments.push_to_hub
        and arguments.hub_strategy != "end",
    }
    found = [name for name, given in refused.items() if given]
    if found:
        raise holdfast.UsageError(f"HoldfastTrainer does not support {'; nor '.join(found)}")
