"""What `load_weights` did, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WeightsReport"]

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What was loaded into a model, by the model's names.

    source, format: what was read. loaded: filled. missing: not in the source; unexpected: only in the source, by the
    source's names; excluded: left as they were by `exclude`; these three stay as the model had them. cast: converted to
    another floating-point type. renamed: what was done to the source's names, for people. size_bytes: of what is filled
    on this rank.
    """

    source: str
    format: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    size_bytes: int = 0
    source_identity: str = ""

    @property
    def complete(self) -> bool:
        """Return whether every tensor of the model was loaded, and every one of the source."""
        return not (self.missing or self.unexpected or self.excluded)

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors from {self.source} ({self.format})"]
        parts += self.renamed
        for what in ("missing", "unexpected", "excluded", "cast"):
            names: tuple[str, ...] = getattr(self, what)
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(parts)
