"""How long does it take to load weights into a live model? `load_weights` from several formats, its peers, and a bare
read of the same bytes, in the same run. The files are in the page cache for all of them.

From Holdfast's own checkpoints every byte is verified; the other formats have nothing to verify.
"""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import load_file, save_file

import holdfast
import raw
from measure import (
    Contender,
    arguments,
    at_most,
    bars_table,
    interleave,
    median,
    numbers_of,
    table,
    times,
    write_results,
)


def model_of(size_bytes: int, width: int = 2048) -> torch.nn.Module:
    """A model of square layers with biases and norms, about this large."""
    layers = max(size_bytes // (4 * width * width), 1)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.LayerNorm(width))]
    return torch.nn.Sequential(*parts)


def main() -> None:
    given = arguments(__doc__).parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(16 << 20 if given.small else 1_500_000_000, 512 if given.small else 2048)
    size = sum(value.nbytes for value in model.state_dict().values())
    with holdfast.CheckpointManager(folder / "run", {"model": model}, mode="sync") as manager:
        manager.save(0)
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "model.pt")
    raw.warm(raw.files_of(folder))
    files = raw.files_of(folder / "run")
    target = raw.huge_pages(sum(path.stat().st_size for path in files))

    def mapped(number: int) -> None:
        model.load_state_dict(torch.load(folder / "model.pt", mmap=True, weights_only=True))

    group = [
        Contender("raw read, 2 threads", lambda n: raw.read_cached(files, target, 2), role="limit"),
        Contender(
            "raw copy of a mapping, 2 threads",
            lambda n: raw.copy_mapped(folder / "model.safetensors", target, 2),
            role="limit",
        ),
        Contender("load_weights, holdfast, verified", lambda n: holdfast.load_weights(model, folder / "run")),
        Contender("load_weights, safetensors", lambda n: holdfast.load_weights(model, folder / "model.safetensors")),
        Contender("load_weights, .pt", lambda n: holdfast.load_weights(model, folder / "model.pt")),
        Contender(
            "safetensors + load_state_dict", lambda n: model.load_state_dict(load_file(folder / "model.safetensors"))
        ),
        Contender("torch.load(mmap) + load_state_dict", mapped),
    ]
    interleave(group, given.rounds)
    medians = {one.name: median(one.seconds) for one in group}
    fastest = min(value for name, value in medians.items() if "load_state_dict" in name and value is not None)
    bar = at_most(
        "load_weights of a Holdfast checkpoint, verified",
        medians["load_weights, holdfast, verified"],
        times(fastest, 1.8),
        "1.8 times the faster of safetensors and torch.load(mmap)",
    )
    text = "## Loading weights into a live model, files in the page cache\n\n"
    text += table("Square layers, float32", group, size) + "\n" + bars_table([bar])
    write_results("load-weights", text, {"load": numbers_of(group)}, given.results)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
