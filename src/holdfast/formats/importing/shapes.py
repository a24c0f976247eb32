"""Judge by the state of a parameter which shape the parameter can have. The state of one parameter enters; a test of
shapes leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.formats.source import TensorEntry
from holdfast.ondisk.regions import Shape

__all__ = ["StateShapes"]

# State that has the shape of its parameter, of the optimizers that torch has and of most others.
_SHAPED_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta", "grad_avg"}
    | {"exp_inf", "prev", "step_size", "ax", "variance", "state1", "state2"}
)
# State of LBFGS over all parameters together, which it keeps with the first.
_OF_ALL_PARAMETERS = frozenset({"d", "prev_flat_grad", "H_diag"})


class StateShapes(NamedTuple):
    """What the state of one parameter shows: the shapes that are the parameter's own, and those of all other tensors,
    which count only where there is none of the first."""

    own: tuple[Shape, ...] = ()
    others: tuple[Shape, ...] = ()

    @classmethod
    def of(cls, state: Any) -> StateShapes:
        """Return what the state of a parameter shows; nothing where it is no dict of tensors."""
        entries = state.items() if isinstance(state, Mapping) else ()
        shapes = {key: value.shape for key, value in entries if isinstance(value, TensorEntry)}
        own = [shape for key, shape in shapes.items() if key in _SHAPED_LIKE_PARAMETER]
        others = [
            shape
            for key, shape in shapes.items()
            if key not in _SHAPED_LIKE_PARAMETER and key not in _OF_ALL_PARAMETERS
        ]
        return cls((*own, *_factored(shapes)), tuple(others))

    def fits(self, shape: Shape) -> bool:
        """Return whether a parameter of this shape can have the state."""
        return self.contradiction(shape) is None

    def contradiction(self, shape: Shape) -> Shape | None:
        """Return the shape of a tensor that state of such a parameter cannot have."""
        if self.own:
            return next((one for one in self.own if one != shape), None)
        return next((one for one in self.others if not _may_belong(one, shape)), None)


def _factored(shapes: Mapping[str, Shape]) -> list[Shape]:
    """Return the shape that the two factors of Adafactor's second moment have together: torch keeps the dimension that
    a factor lacks with the size 1, and `transformers` leaves it out."""
    found = []
    row, column = shapes.get("row_var", ()), shapes.get("col_var", ())
    if len(row) == len(column) >= 2 and row[-1] == column[-2] == 1:
        found.append((*row[:-1], column[-1]))
    row, column = shapes.get("exp_avg_sq_row", ()), shapes.get("exp_avg_sq_col", ())
    if len(row) == len(column) >= 1:
        found.append((*row, column[-1]))
    return found


def _may_belong(one: Shape, shape: Shape) -> bool:
    """Return whether a tensor of any name may be state of a parameter: it has its shape, is reduced along some of its
    dimensions, has another number of them, or is a square matrix over one of them, as preconditioners are."""
    if len(one) != len(shape):
        return True
    is_square = len(one) == 2 and one[0] == one[1] and one[0] in shape
    return is_square or all(size in (1, own) for size, own in zip(one, shape, strict=True))
