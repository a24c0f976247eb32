"""Bring names of tensors together by the prefixes that wrappers add, after the renaming that a user asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.loading.renaming import Rename, Renamed, renamed

__all__ = ["PREFIXES", "Rename", "Renamed", "aligned", "renamed"]

PREFIXES = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def aligned(found: Renamed, wanted: Collection[str]) -> Renamed:
    """Return the names with prefixes removed or added so that most of them are names that are wanted.

    Only one and the same change for all names is made, and only where it brings more of them together than none.
    """
    candidates = [(0, found.names, "")]
    names = _without_inner(found.names)
    inner = "" if names.keys() == found.names.keys() else f"{', '.join(_INNER)} removed inside of names"
    for prefix in ("", *PREFIXES):
        # Names without it stay as they are: `module.*` of an averaged model stand beside its count.
        cut = {name.removeprefix(prefix): old for name, old in names.items()}
        count = sum(name.startswith(prefix) for name in names)
        if (prefix and count == 0) or len(cut) != len(names):
            continue
        for added in ("", *PREFIXES):
            if added and added == prefix:
                continue
            what = "; ".join(
                part
                for part in (
                    inner,
                    f"'{prefix}' removed from {count} names" if prefix else "",
                    f"'{added}' added to {len(cut)} names" if added else "",
                )
                if part
            )
            candidates.append((len(candidates), {f"{added}{name}": old for name, old in cut.items()}, what))
    wanted = set(wanted)
    # Of several that bring equally many together, the first one, which changes the least.
    best = max(candidates, key=lambda one: (len(wanted.intersection(one[1])), -one[0]))
    return Renamed(best[1], (*found.changes, best[2]) if best[2] else found.changes)


def _without_inner(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names without the parts that wrappers put inside of them; as they are where two would become one."""
    cut = {}
    for name, old in names.items():
        new = name
        for part in _INNER:
            new = new.replace(f".{part}", ".").removeprefix(part)
        cut[new] = old
    return cut if len(cut) == len(names) else dict(names)
