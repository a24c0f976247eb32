"""Put the parts of the contract together. Inherited by the tests of a storage."""

from __future__ import annotations

from holdfast.testing.contract.creating import CreateContract
from holdfast.testing.contract.features import FeaturesContract
from holdfast.testing.contract.listing import ListContract
from holdfast.testing.contract.putting import PutContract
from holdfast.testing.contract.reading import ReadContract

__all__ = ["StorageContract"]


class StorageContract(PutContract, CreateContract, ReadContract, ListContract, FeaturesContract):
    """Inherit, override `make` so that it returns a new storage, and `reopen` so that it opens the same place again, as
    another process would.

    A storage that no other process can open, such as one in memory, leaves `reopen` as it is.
    """
