"""The contract of `holdfast.storage.base` as tests that a storage inherits. Knows the protocol; knows no storage.

    class TestMyStorage(StorageContract):
        def make(self, tmp_path):
            return MyStorage(...)          # a new, empty one at each call

        def reopen(self, storage):
            return MyStorage(...)          # another object on the same place, as a second process would open it

`tmp_path` is pytest's. A storage that passes can hold a run. `many_keys` is more than the storage lists in one answer.
What only a power cut can show, that bytes and names really are durable, a contract cannot test.
"""

from holdfast.testing.contract.storage import StorageContract

__all__ = ["StorageContract"]
