"""Every sample of an epoch is dealt once, and those that repeat are in the last round."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DistributedSampler

from holdfast.data.dealing import count_left, derived_seed, epoch_order, left_after, share_length, share_of

LENGTHS = [0, 1, 2, 3, 7, 8, 24]
SIZES = [1, 2, 3, 4, 9]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_are_dealt_what_a_distributed_sampler_deals_them(shuffle: bool, drop_last: bool) -> None:
    for length, size, epoch in itertools.product(LENGTHS[1:], SIZES, (0, 3)):
        if drop_last and length < size:
            continue  # DistributedSampler deals a negative number of samples then
        left = epoch_order(length, shuffle=shuffle, seed=11, epoch=epoch)
        for rank in range(size):
            theirs = DistributedSampler(list(range(length)), size, rank, shuffle, 11, drop_last)
            theirs.set_epoch(epoch)
            assert share_of(left, rank, size, drop_last=drop_last).tolist() == list(theirs)


def test_without_the_repeated_ones_shares_have_every_sample_once() -> None:
    for length, size in itertools.product(LENGTHS, SIZES):
        order = epoch_order(length, shuffle=True, seed=0, epoch=0)
        shares = [share_of(order, rank, size, drop_last=False).tolist() for rank in range(size)]
        rounds = [sample for row in itertools.zip_longest(*shares) for sample in row]
        assert rounds[:length] == order.tolist()
        assert len(rounds) - length == -length % size if length else rounds == []
        dropped = [share_of(order, rank, size, drop_last=True).tolist() for rank in range(size)]
        assert sorted(itertools.chain(*dropped)) == sorted(order.tolist()[: length // size * size])


def test_what_is_left_are_the_samples_that_no_rank_got_in_their_order() -> None:
    for length, size in itertools.product(LENGTHS, (1, 2, 3)):
        order = epoch_order(length, shuffle=True, seed=0, epoch=0)
        each = share_length(length, size, drop_last=False)
        for counts in itertools.product(range(each + 1), repeat=size):
            got = {sample for rank, count in enumerate(counts) for sample in order[rank::size][:count].tolist()}
            left = left_after(order, [counts])
            assert left.tolist() == [sample for sample in order.tolist() if sample not in got]
            assert count_left(length, [counts]) == len(left)
            again = left_after(left, [(1,)])
            assert left_after(order, [counts, (1,)]).tolist() == again.tolist()
            assert count_left(length, [counts, (1,)]) == len(again)


def test_lengths_are_those_of_the_shares() -> None:
    for length, size, drop_last in itertools.product(LENGTHS, SIZES, (False, True)):
        for rank in range(size):
            share = share_of(torch.arange(length), rank, size, drop_last=drop_last)
            assert len(share) == share_length(length, size, drop_last=drop_last)


def test_a_derived_seed_depends_on_every_part_and_on_nothing_else() -> None:
    assert derived_seed(0, (1, 2)) == derived_seed(0, (1, 2)) == 2633094257891869608
    assert len({derived_seed(*parts) for parts in itertools.product(range(5), repeat=3)}) == 125
    assert all(0 <= derived_seed(part) < 2**63 for part in range(100))
