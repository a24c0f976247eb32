"""Compare the replicas of leaves. Sets of replicas and their memory enter; digests leave, and, on the leader,
what differs. Knows torch; knows nothing of files.

All of a set is compared when it is new, and a sample of it at each later save. A sample of host memory is digested in
the call. A sample of a device is only enqueued there, in the order of the training's stream, and is sent with a later
save: the call must not wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from holdfast.errors import UsageError
from holdfast.ranks.wording import ranks_in_words
from holdfast.saving.messages import HOST, UNSAMPLED, ReplicaSet, Sample, StateSummary
from holdfast.state.devices import ACCELERATORS, Accelerator, Accelerators, DeviceEvent
from holdfast.state.tensors import host_pieces, is_dense, is_host_memory, memory_at

WINDOW_BYTES = 32 << 10
"""How much of one part a sample takes. A larger part is sampled window by window, the next one each time."""
_SLICE_BYTES = 16 << 20
_DIGEST_BYTES = 16
_KEPT_ROUNDS = 8
_WAYS_OUT = (
    "synchronise the replicas; or declare what each rank's state is: PerRank(component), pipeline_stage= for stages "
    "whose names collide, Sharded(model, ...) for local shards of whole tensors; or pass replicas='trust' to store one "
    "rank's copy of each leaf without a comparison"
)


def digest_sets(sets: Sequence[ReplicaSet], rank: int, memory: Sequence[torch.Tensor]) -> tuple[bytes, ...]:
    """Return one digest for each set that this rank is in, of all that it holds of that set."""
    return tuple(_digest(one, [memory[part] for part in one.parts_of(rank)]) for one in sets if rank in one.ranks)


def digest_parts(
    sets: Sequence[ReplicaSet], numbers: Sequence[int], rank: int, memory: Sequence[torch.Tensor]
) -> tuple[tuple[bytes, ...], ...]:
    """Return, for each of the numbered sets, a digest of each part that this rank holds of it; none where it is not in
    the set."""
    return tuple(
        tuple(_digest(sets[number], [memory[part]]) for part in sets[number].parts_of(rank))
        if rank in sets[number].ranks
        else ()
        for number in numbers
    )


class Sampler:
    """Takes the samples of one rank, from save to save."""

    def __init__(self, rank: int, accelerators: Accelerators = ACCELERATORS) -> None:
        self._rank = rank
        self._accelerators = accelerators
        self._mine: list[tuple[int, ReplicaSet, tuple[int, ...]]] = []
        self._comparison = 0
        self._structure = ""
        self._enqueued: list[_Enqueued] = []
        self.sets: tuple[ReplicaSet, ...] = ()
        self.round = 0

    def comparison(self, structure: str) -> int:
        """Return the number of the sets that this rank has for a state of this structure; 0: none."""
        return self._comparison if structure == self._structure else 0

    def begin(self, sets: Sequence[ReplicaSet], comparison: int, structure: str) -> None:
        """Sample from these sets from now on, as long as the state has this structure."""
        mine = [(number, one) for number, one in enumerate(sets) if self._rank in one.ranks and one.quota]
        self._mine = [(number, one, one.parts_of(self._rank)) for number, one in mine]
        self.sets, self._comparison, self._structure, self._enqueued = tuple(sets), comparison, structure, []

    def take(self, memory: Sequence[torch.Tensor], structure: str, step: int) -> tuple[Sample, ...]:
        """Return the samples that are ready: this save's of host memory, and earlier ones of devices."""
        if not self._mine or structure != self._structure:
            return ()
        with torch.no_grad():
            return self._take(memory, step)

    def _take(self, memory: Sequence[torch.Tensor], step: int) -> tuple[Sample, ...]:
        ready = [one for one in self._enqueued if one.is_ready()]
        self._enqueued = [one for one in self._enqueued if one not in ready][-_KEPT_ROUNDS:]
        here: list[tuple[int, bytes]] = []
        there: list[tuple[int, list[torch.Tensor]]] = []
        for number, one, parts in self._mine:
            windows = _windows(memory, parts, one.quota, self.round)
            if one.device == HOST:
                here.append((number, _digest_on_host(windows)))
            else:
                there.append((number, _sums_on_devices(windows)))
        if there:
            self._enqueued.append(_Enqueued.of(self.round, step, there, self._accelerators))
        samples = tuple(one.sample() for one in ready)
        return (*samples, Sample(self.round, step, tuple(here))) if here else samples


@dataclass(slots=True)
class ReplicaMonitor:
    """What the leader knows of the replicas: the sets, the names of their leaves, and the samples that came in."""

    sets: tuple[ReplicaSet, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    comparison: int = 0
    round: int = 0
    _came: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)
    _suspect_step: int | None = None

    def knows(self, sets: tuple[ReplicaSet, ...], summaries: Sequence[StateSummary]) -> bool:
        """Return whether these sets were compared before, and every rank has them."""
        return sets == self.sets and all(summary.comparison == self.comparison for summary in summaries)

    def begin(self, sets: tuple[ReplicaSet, ...], names: tuple[tuple[str, ...], ...]) -> None:
        """Watch these sets from now on."""
        self.sets, self.names, self._came, self._suspect_step = sets, names, {}, None
        self.comparison += 1

    def forget(self) -> None:
        """Trust no earlier comparison."""
        self.comparison += 1

    def note_samples(self, summaries: Sequence[StateSummary], step: int) -> tuple[int, ...]:
        """Take in the samples that came with the save of `step`. Return the numbers of the sets that differ."""
        if any(summary.comparison != self.comparison for summary in summaries):
            return ()
        steps: dict[int, int] = {}  # a round is complete only now, so that some rank's sample of it is among these
        for rank, summary in enumerate(summaries):
            for sample in summary.samples:
                steps[sample.round] = sample.step
                for number, digest in sample.digests:
                    self._came.setdefault((sample.round, number), {})[rank] = digest
        complete = [key for key, came in self._came.items() if len(came) == len(self.sets[key[1]].ranks)]
        differing = [key for key in complete if len(set(self._came[key].values())) > 1]
        gone = {*complete, *(key for key in self._came if key[0] <= self.round - _KEPT_ROUNDS)}
        self._came = {key: came for key, came in self._came.items() if key not in gone}
        if differing:
            found = steps[min(differing)[0]]
            self._suspect_step = found if found != step else None
        return tuple(sorted({number for _, number in differing}))

    def compare(self, digests: Sequence[Sequence[bytes]]) -> tuple[int, ...]:
        """Return the numbers of the sets that differ, from every rank's digests of all its sets."""
        ahead = [iter(own) for own in digests]
        found = [{next(ahead[rank]) for rank in one.ranks} for one in self.sets]
        return tuple(number for number, seen in enumerate(found) if len(seen) > 1)

    def difference(self, numbers: Sequence[int], digests: Sequence[Sequence[Sequence[bytes]]]) -> UsageError:
        """Return the error that names what differs, from every rank's digests of each part of the numbered sets."""
        wrong: list[tuple[str, dict[bytes, list[int]]]] = []
        for place, number in enumerate(numbers):
            one = self.sets[number]
            for leaf, seen in zip(
                self.names[number], zip(*(digests[rank][place] for rank in one.ranks), strict=True), strict=True
            ):
                holders: dict[bytes, list[int]] = {}
                for rank, digest in zip(one.ranks, seen, strict=True):
                    holders.setdefault(digest, []).append(rank)
                if len(holders) > 1:
                    wrong.append((leaf, holders))
        return self._error(wrong)

    def _error(self, wrong: Sequence[tuple[str, Mapping[bytes, Sequence[int]]]]) -> UsageError:
        total = len({leaf for names in self.names for leaf in names})
        step = self._suspect_step
        seen = f"; first seen at step {step}, whose checkpoint may mix them" if step is not None else ""
        if not wrong:
            return UsageError(f"replicas of leaves differed and are the same now{seen}", advice=_WAYS_OUT)
        leaf, holders = wrong[0]
        sides = " and ".join(ranks_in_words(ranks) for ranks in list(holders.values())[:2])
        kinds = f" ({len(holders)} different contents)" if len(holders) > 2 else ""
        count = len({name for name, _ in wrong})
        return UsageError(
            f"the replicas on {sides} have different content{kinds}; {count} of {total} replicated leaves differ{seen}",
            leaf=leaf,
            advice=_WAYS_OUT,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Enqueued:
    """A sample that devices are working on. Its sums are copied to page-locked memory; the events follow the copies."""

    round: int
    step: int
    sums: list[tuple[int, list[torch.Tensor]]]
    events: list[DeviceEvent]

    @classmethod
    def of(
        cls,
        number: int,
        step: int,
        sums: Sequence[tuple[int, list[torch.Tensor]]],
        accelerators: Accelerators,
    ) -> _Enqueued:
        used = accelerators.among(one.device for _, some in sums for one in some)
        copies = [(index, [_to_host(one, used.get(one.device)) for one in some]) for index, some in sums]
        events = [kind.record_event(kind.current_stream(device)) for device, kind in used.items()]
        return cls(number, step, copies, events)

    def is_ready(self) -> bool:
        return all(event.query() for event in self.events)

    def sample(self) -> Sample:
        return Sample(self.round, self.step, tuple((number, _total(some)) for number, some in self.sums))


def _to_host(one: torch.Tensor, accelerator: Accelerator | None) -> torch.Tensor:
    if accelerator is None:  # the state has moved since the sets were made
        return one.cpu()
    return accelerator.empty_page_locked((), one.dtype).copy_(one, non_blocking=True)


def _total(sums: Sequence[torch.Tensor]) -> bytes:
    return (sum(int(one.item()) for one in sums) % 2**64).to_bytes(8, "little")


def _digest(one: ReplicaSet, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a digest of whole tensors. Waits for the device that holds them."""
    with torch.no_grad():
        if one.device in (HOST, UNSAMPLED):
            return _digest_on_host(tensors)
        return _total(_sums_on_devices(tensors))


def _digest_on_host(tensors: Sequence[torch.Tensor]) -> bytes:
    state = blake3()
    for tensor in tensors:
        if is_host_memory(tensor):
            state.update(memory_at(tensor.data_ptr(), tensor.nbytes))
        else:
            for piece in host_pieces(tensor):
                state.update(piece)
    return state.digest(_DIGEST_BYTES)


def _windows(memory: Sequence[torch.Tensor], parts: Sequence[int], quota: int, number: int) -> list[torch.Tensor]:
    """Return what the sample of this number takes of the parts: as many of them as the quota allows, from where the
    last sample ended, and of each the next window. All holders of the parts come to the same."""
    first = number * quota if quota < len(parts) else number * len(parts)
    places = range(first, first + min(quota, len(parts)))
    return [_window(memory[parts[place % len(parts)]], place // len(parts)) for place in places]


def _window(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return a piece of at most `WINDOW_BYTES` of a tensor, the next one at each turn."""
    tensor = tensor.detach()
    length = max(WINDOW_BYTES // tensor.element_size(), 1)
    count = tensor.numel()
    if count <= length:
        return tensor
    start = turn % -(-count // length) * length
    length = min(length, count - start)
    if is_dense(tensor):
        return tensor.view(-1)[start : start + length]
    # The same elements of a tensor whose memory has another order.
    flat = torch.arange(start, start + length, device=tensor.device)
    return tensor[torch.unravel_index(flat, tensor.shape)]


def _sums_on_devices(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a number for the content of the tensors on each of their devices, without waiting for it.

    Bits count, and where they lie among all of the tensors; it tells replicas apart and is no cryptographic digest.
    """
    sums: dict[torch.device, torch.Tensor] = {}
    place = 0
    for device, piece in _slices(tensors):
        count = piece.numel() // 8
        words = piece.view(torch.int64)
        places = torch.arange(place, place + count, device=device)
        mixed = _mixed(words, places).sum()
        sums[device] = sums[device] + mixed if device in sums else mixed
        place += count
    return list(sums.values())


def _slices(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.device, torch.Tensor]]:
    """Yield the bytes of the tensors, each filled up to whole words, in new memory. Small ones are joined: to enqueue
    the work costs more than it takes."""
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        dense = tensor if is_dense(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
        flat = dense.detach().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _SLICE_BYTES):
            piece = flat[start : start + _SLICE_BYTES] if flat.numel() > _SLICE_BYTES else flat
            if waiting and (piece.device != waiting[0].device or size + piece.numel() > _SLICE_BYTES):
                yield waiting[0].device, torch.cat(waiting)
                waiting, size = [], 0
            waiting.append(piece)
            if piece.numel() % 8:
                waiting.append(torch.zeros(-piece.numel() % 8, dtype=torch.uint8, device=piece.device))
            size += piece.numel()
    if waiting:
        yield waiting[0].device, torch.cat(waiting)


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scramble content and place together, with the wrapping arithmetic of 64-bit integers."""
    value = (words ^ (places * -7046029254386353131)) * -4417276706812531889
    value ^= value >> 29
    value *= -4658895280553007687
    value ^= value >> 32
    return value
