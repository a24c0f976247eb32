"""What a plan makes of the ranks' inventories: which leaves must be the same on which ranks, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import UsageError
from holdfast.ondisk.manifest import BLOCK_BYTES, MAX_MANIFEST_BYTES, block_bytes_for
from holdfast.ondisk.regions import Box, whole
from holdfast.saving.messages import UNSAMPLED, Inventory, PartEntry, ReplicaSet, TreeEntry
from holdfast.saving.plan import SAMPLED_DEVICE_PARTS, SAMPLED_HOST_PARTS, _regions, plan

NOTHING = msgspec.Raw(b"\xc0")


def tree(component: str = "model", kind: str = "module", scope: str | None = "") -> TreeEntry:
    return TreeEntry(component, kind, scope, "", NOTHING)


def replica(path: str, shape: tuple[int, ...] = (4, 2), **changes: object) -> PartEntry:
    return msgspec.structs.replace(PartEntry(0, path, "float32", shape, whole(shape), False), **changes)


def rows(path: str, first: int, count: int, *, mesh: int = 0) -> PartEntry:
    return PartEntry(0, path, "float32", (4, 2), Box((first, 0), (count, 2)), True, mesh=mesh)


def inventory(*parts: PartEntry, kind: str = "module", meshes: tuple[tuple[int, ...], ...] = ()) -> Inventory:
    return Inventory((tree(kind=kind),), parts, (), (), meshes)


def test_leaves_that_all_ranks_hold_are_one_set_and_equal_parts_are_sent_once() -> None:
    own = inventory(replica("a"), replica("b"))
    planned = plan([own, own, own])
    (found,) = planned.replicas
    assert (found.ranks, found.parts, found.choice) == ((0, 1, 2), ((0, 1),), (0, 0, 0))
    assert (found.device, found.quota) == ("cpu", SAMPLED_HOST_PARTS)
    assert planned.compared == (("model.a", "model.b"),)


def test_ranks_with_other_inventories_find_their_own_parts() -> None:
    planned = plan([inventory(replica("a"), replica("b")), inventory(replica("x"), replica("b"), replica("a"))])
    (found,) = planned.replicas
    assert planned.compared == (("model.a", "model.b"),)
    assert (found.parts_of(0), found.parts_of(1)) == ((0, 1), (2, 1))


def test_what_one_rank_holds_or_the_first_rank_decides_is_not_compared() -> None:
    planned = plan(
        [
            inventory(replica("a"), replica("buffer", led=True), replica("empty", (0, 2))),
            inventory(replica("b"), replica("buffer", led=True), replica("empty", (0, 2))),
        ]
    )
    assert planned.replicas == ()


def test_plain_tensors_of_values_are_compared_by_their_digests_and_not_again() -> None:
    own = inventory(replica("a"), kind="values")
    assert plan([own, own]).replicas == ()


def test_each_shard_of_a_hybrid_mesh_is_compared_among_its_replicas() -> None:
    meshes = ((0, 1, 2, 3),)
    upper, lower = (inventory(rows("a", first, 2), meshes=meshes) for first in (0, 2))
    planned = plan([upper, lower, upper, lower])
    assert [found.ranks for found in planned.replicas] == [(0, 2), (1, 3)]


def test_replicas_on_different_kinds_of_devices_are_compared_and_not_sampled() -> None:
    planned = plan([inventory(replica("a")), inventory(replica("a", device="cuda"))])
    assert [(found.device, found.quota) for found in planned.replicas] == [("", 0)]


def test_replicas_on_accelerators_of_one_kind_are_sampled_less_than_those_in_host_memory() -> None:
    own = inventory(replica("a", device="cuda"))
    assert [(found.device, found.quota) for found in plan([own, own]).replicas] == [("cuda", SAMPLED_DEVICE_PARTS)]
    assert SAMPLED_DEVICE_PARTS < SAMPLED_HOST_PARTS


def test_replicas_on_a_device_that_cannot_be_sampled_are_compared_once() -> None:
    own = inventory(replica("a", device=UNSAMPLED))
    assert [(found.device, found.quota) for found in plan([own, own]).replicas] == [(UNSAMPLED, 0)]


@pytest.mark.guarantee("G2")
def test_one_leaf_on_two_meshes_is_an_error_that_names_both() -> None:
    stages = [inventory(rows("a", first, 2), meshes=(ranks,)) for ranks in ((0, 1), (2, 3)) for first in (0, 2)]
    with pytest.raises(UsageError, match=r"mesh of ranks 0, 1 and over the mesh of ranks 2, 3") as caught:
        plan(stages)
    assert caught.value.leaf == "model.a"
    assert "pipeline_stage" in caught.value.advice
    assert plan(stages, "trust").replicas == ()


def test_meshes_that_another_leaf_joins_may_hold_replicas_and_are_compared() -> None:
    both = (0, 1, 2, 3)
    ranks = [
        inventory(rows("a", first, 2), rows("joint", place, 1, mesh=1), meshes=(mesh, both))
        for place, (first, mesh) in enumerate([(0, (0, 2)), (0, (1, 3)), (2, (0, 2)), (2, (1, 3))])
    ]
    assert [(found.ranks, names) for found, names in zip(*sets_of(ranks), strict=True)] == [
        ((0, 1), ("model.a",)),
        ((2, 3), ("model.a",)),
    ]


def sets_of(inventories: list[Inventory]) -> tuple[tuple[ReplicaSet, ...], tuple[tuple[str, ...], ...]]:
    planned = plan(inventories)
    return planned.replicas, planned.compared


def test_meshes_are_joined_by_way_of_others() -> None:
    joined = _regions([(0, 1), (2, 3), (4, 5), (1, 2)])
    assert len({joined[rank] for rank in range(4)}) == 1
    assert joined[4] == joined[5] != joined[0]


def test_trusted_replicas_are_stored_once_and_not_compared() -> None:
    own = inventory(replica("a"))
    planned = plan([own, own], "trust")
    assert planned.replicas == ()
    assert sum(len(assignment.parts) for assignment in planned.assignments) == 1


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 64 << 10), (1 << 18, 64 << 10), ((1 << 18) + 1, 128 << 10), (1 << 20, 256 << 10), (1 << 30, 1 << 20)],
)
def test_every_rank_gets_the_same_blocks_small_ones_where_that_takes_few_digests(rows: int, expected: int) -> None:
    """A row has 2 KiB. The rank that writes most has at most 8192 digests, or blocks of 1 MiB."""
    large = PartEntry(0, "large", "float32", (rows, 512), whole((rows, 512)), False)
    planned = plan([inventory(large, replica("a")), inventory(replica("a"))])
    assert [one.block_bytes for one in planned.assignments] == [expected, expected]
    assert planned.block_bytes == expected


@pytest.mark.parametrize(("ranks", "gib"), [(2048, 782), (4096, 4526), (1024, 16)])
def test_the_digests_of_very_many_ranks_stay_few_enough_for_one_manifest(ranks: int, gib: int) -> None:
    """70 and 405 billion parameters with AdamW, and 1.4 billion: none may have a manifest that nothing can open."""
    sizes = [(gib << 30) // ranks] * ranks
    block_bytes = block_bytes_for(sizes)
    blocks = sum(-(-size // block_bytes) for size in sizes)
    assert 70 * blocks < MAX_MANIFEST_BYTES // 2
    assert block_bytes == BLOCK_BYTES or blocks <= 1 << 20


def test_a_part_that_is_stored_anew_has_the_blocks_of_the_rest() -> None:
    assert plan([inventory(replica("a"))], block_bytes=4096).assignments[0].block_bytes == 4096
