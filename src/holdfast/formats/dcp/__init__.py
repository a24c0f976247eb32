"""PyTorch's own checkpoint API over Holdfast's files. A planner's items enter, a committed checkpoint leaves, and back.

    dcp.save(state, storage_writer=HoldfastWriter("runs/tiny"))
    dcp.load(state, storage_reader=HoldfastReader("runs/tiny"))

PyTorch's planner decides which rank writes and reads what, and PyTorch carries every agreement between ranks. The
files, the manifest and the order in which they become durable are those of any other checkpoint.

Names. PyTorch flattens a state dict to dotted keys. The part of a key before its first dot is the component when it can
be one, and the key is the leaf's name: `model.layers.0.weight` is a leaf of `model`. Every other key, such as `epoch`,
goes into one more component, `state`, as the leaf `state.epoch`. A component's values are nested as they were in the
state dict. The manifest's `extra` has a note, `dcp`: `loose` is that one more component, `flat` are the components that
were no dict of their own, but the front of dotted keys, `whole` are the keys whose value is a dict or a list that the
planner did not flatten, and `save_id` is the id of the save as PyTorch has it.

The lease. The run is leased for the time of a save. PyTorch calls no method of a writer when a save fails elsewhere,
so a thread of the coordinator checks whether the call that the save is part of still runs, and releases the run when it
has ended (`claims`). Releasing it too early would be safe: the lease's number fences, so a save is committed only if no
other writer came.

The claim of a reader. Each rank claims the checkpoint that it loads, so that retention does not delete it: from
`read_metadata()` to the end of its `read_data()`, or of the call that failed, which is watched in the same way.
Metadata that is read outside of a load is claimed only while it is read.
"""

from holdfast.formats.dcp.reader import HoldfastReader
from holdfast.formats.dcp.writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
