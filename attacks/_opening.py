"""Open a hostile file as a user would, and go as far as its weights."""

from __future__ import annotations

from os import PathLike

from holdfast.errors import HoldfastError
from holdfast.formats.registry import open_source
from holdfast.formats.weights.selection import find_weights

__all__ = ["error_of_opening"]


def error_of_opening(path: str | PathLike[str]) -> HoldfastError:
    """Return the error that Holdfast raises when it opens a file and reads all that is in it."""
    try:
        with open_source(path) as source:
            assert source.config is None or source.config
            for asset in source.assets.values():
                for _ in asset.pieces():
                    pass
            for entry in find_weights(source).values():
                for _ in source.pieces(entry):
                    pass
    except HoldfastError as error:
        return error
    raise AssertionError(f"{path} was read without an error")
