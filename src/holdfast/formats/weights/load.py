"""Load weights of any format into a model, or build a model from them. A model and a source enter; a report leaves.

Names, shapes and types are compared before any tensor changes, on all ranks of a sharded model. Each rank reads the
bytes that it needs, once, straight into the model's memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, HoldfastError, StateMismatchError, UsageError
from holdfast.formats.registry import open_source
from holdfast.formats.source import Source
from holdfast.formats.weights.filling import fill_tensors
from holdfast.formats.weights.fitting import FittedWeights, fit
from holdfast.formats.weights.meta import check_memory, give_memory, parameters_on_meta
from holdfast.formats.weights.renaming import Rename
from holdfast.formats.weights.report import WeightsReport
from holdfast.formats.weights.selection import find_extra_states, find_weights
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS, Ranks, together
from holdfast.ranks.torch_store import torch_ranks
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.state.modules import load_module, module_state
from holdfast.state.names import cuts_of, parameter_names, unwrap
from holdfast.state.tensors import any_sharded
from holdfast.state.wrappers import Sharded
from holdfast.storage.base import Storage

logger = logging.getLogger("holdfast")

__all__ = ["build_model", "load_weights"]

Location = str | os.PathLike[str] | Storage | Checkpoint | Source

_NAME = "model"
_PARTLY_FILLED = "the model may be partly filled: load other weights before it is used"


def load_weights(
    model: torch.nn.Module | Sharded,
    source: Location,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    exclude: Sequence[str] = (),
    component: str | None = None,
    device: torch.device | str = "cpu",
    process_group: Any = None,
) -> WeightsReport:
    """Fill a model with the weights of a checkpoint in any format, and return what was loaded.

    source: a run, `RUN@SELECTOR` or `Checkpoint` of Holdfast, a DCP folder, a safetensors file, a Hugging Face folder,
        a `.pt`, `.bin` or `.ckpt` file, a `.nemo` archive. Its kind is found from its content.
    strict: every tensor of the model is in the source, and the other way round. Without it, what is missing or left
        over is listed in the report. Nothing in common, and another shape, are errors in any case.
    rename: how names of the source become names of the model: a mapping of names, which may have `*`, a list of pairs
        of a regular expression and its replacement, or a function; None for a name leaves the tensor out. Prefixes that
        wrappers add, such as `module.`, are found without it, and reported.
    cast: convert to the model's type where both are one of float64, float32, float16 and bfloat16.
    exclude: globs over the model's names. These tensors stay as they are.
    component: the part of the source that is the model, such as `ema`; needed only where more than one could be.
    device: where tensors of a model on the meta device get memory. Tensors of a sharded one get it on their mesh.
    process_group: the ranks that hold a sharded model together, all by default. All of them must call this.

    Nothing changes before all names, shapes and types fit, on all ranks. Damage is found while the bytes are read: it
    is an error, and the model is then partly filled and must be loaded again.
    """
    module = unwrap(model)
    _check_module(module)
    ranks = _ranks_of(module, process_group)
    with ExitStack() as stack:

        def fitted_weights() -> tuple[Source, FittedWeights]:
            # Opened here, on each rank: a file that one of them cannot read is then an error on all.
            _check_exclude(exclude)
            opened = source if isinstance(source, Source) else stack.enter_context(_opened(source))
            fitted = _fit(model, opened, strict, rename, cast, exclude, component)
            check_memory(module, fitted.entries, fitted.tied)
            return opened, fitted

        opened, fitted = _fit_on_all(ranks, fitted_weights)
        _fill_on_all(ranks, lambda: _fill(model, module, opened, fitted, device))
    logger.info("%s", fitted.report)
    return fitted.report


def build_model(
    source: Location,
    factory: Callable[[Any], torch.nn.Module],
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    component: str | None = None,
) -> tuple[torch.nn.Module, Any]:
    """Build a model from the configuration that is stored with its weights, fill it, and return both.

    `factory` gets the configuration and returns the model. Its parameters take no memory while it runs: each gets its
    memory on `device` once, and is filled from the files. Buffers are made as the factory makes them.
    """
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(_opened(source))
        config = opened.config
        if config is None:
            raise UsageError(
                "no configuration is stored with these weights",
                file=opened.location,
                advice="build the model yourself and call load_weights(); a CheckpointManager stores what it is given "
                "as config=",
            )
        model = _built(factory, config)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"the factory returned a {type(model).__name__}, not a torch.nn.Module")
        load_weights(model, opened, strict=strict, rename=rename, cast=cast, component=component, device=device)
        # The parameters are there already; buffers that the factory made follow them.
        model.to(device)
    return model, config


def _built(factory: Callable[[Any], torch.nn.Module], config: Any) -> Any:
    """Call the factory with parameters that have no memory. One that needs their content is told what to do instead."""
    try:
        with parameters_on_meta():
            return factory(config)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise UsageError(
            f"the factory uses the content of a parameter, which has none while it runs: {error}",
            advice="build the model yourself and call load_weights()",
        ) from error


def _opened(source: str | os.PathLike[str] | Storage | Checkpoint) -> Source:
    if isinstance(source, Checkpoint):
        from holdfast.formats.own import OwnSource

        return OwnSource(source)
    return open_source(source)


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"load_weights() fills a torch.nn.Module, not a {type(module).__name__}")


def _check_exclude(exclude: object) -> None:
    if isinstance(exclude, str) or not all(isinstance(glob, str) for glob in exclude):  # type: ignore[attr-defined]
        raise UsageError(f"exclude={exclude!r:.100}", advice="give a list of globs")


def _ranks_of(module: torch.nn.Module, process_group: Any) -> Ranks | None:
    """Return the ranks that must agree, or None for a model that each process has for itself."""
    if not any_sharded((*module.parameters(), *module.buffers())):
        return None
    return torch_ranks(process_group, timeout_seconds=DEFAULT_TIMEOUT_SECONDS)


def _fit(
    model: torch.nn.Module | Sharded,
    source: Source,
    strict: bool,
    rename: Rename | None,
    cast: bool,
    exclude: Sequence[str],
    component: str | None,
) -> FittedWeights:
    module = unwrap(model)
    parameter_names(module)  # also brings FSDP's parameters back to their shards
    return fit(
        module_state(_NAME, module),
        find_weights(source, component),
        find_extra_states(source, component),
        cuts=cuts_of(_NAME, {_NAME: model}),
        module=module,
        source=source,
        strict=strict,
        rename=rename,
        cast=cast,
        exclude=tuple(exclude),
    )


def _fit_on_all(ranks: Ranks | None, work: Callable[[], tuple[Source, FittedWeights]]) -> tuple[Source, FittedWeights]:
    """Do the work on every rank; an error of one is raised on all, before any of them changes anything."""
    if ranks is None:
        return work()
    found: list[tuple[Source, FittedWeights]] = []

    def mine() -> str:
        found.append(work())
        return found[0][1].report.source_identity

    identities = together(ranks, "load weights", mine, sends=str)
    if len(set(identities)) > 1:
        raise StateMismatchError(
            f"the ranks read different checkpoints: {', '.join(sorted(set(identities))[:4])}",
            advice="name the step, or give all ranks the same path",
        )
    return found[0]


def _fill_on_all(ranks: Ranks | None, work: Callable[[], None]) -> None:
    if ranks is None:
        work()
    else:
        together(ranks, "fill weights", work, sends=None)


def _fill(
    model: torch.nn.Module | Sharded,
    module: torch.nn.Module,
    source: Source,
    fitted: FittedWeights,
    device: torch.device | str,
) -> None:
    """Fill the tensors of this rank, then let the module's own hooks take up what was loaded."""
    give_memory(module, device)
    state = module_state(_NAME, module)
    cuts = cuts_of(_NAME, {_NAME: model})
    try:
        with torch.inference_mode(False), torch.no_grad():
            with Progress(f"loading {source.location}", fitted.report.size_bytes) as progress:
                extras = fill_tensors(state, fitted, source, cuts, progress.add)
            load_module(_NAME, module, {**state, **extras})
    except CorruptCheckpointError as error:
        raise error.changed(advice=_PARTLY_FILLED) from error
    except HoldfastError:
        raise
    except Exception as error:
        raise HoldfastError(f"the weights could not be loaded: {type(error).__name__}: {error}") from error
    except BaseException as error:
        # An interrupt goes on as it is, with a note for the code that catches it.
        logger.warning("loading %s was interrupted, and %s", source.location, _PARTLY_FILLED)
        error.add_note(_PARTLY_FILLED)
        raise
