"""`PagePool`: which page belongs to which sequence."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from cudnn_sdpa import OptionError, OutOfPagesError
from cudnn_sdpa.attention.paged import page_pool
from cudnn_sdpa.attention.paged.page_pool import PagePool


def owners(pool):
    found = {}
    for number, sequence in pool._sequences.items():
        for page in sequence.pages:
            found.setdefault(page, []).append(number)
    return found


def check(pool):
    """A page is free or belongs to its counted owners, and every sequence has room for its tokens."""
    found = owners(pool)
    assert [len(found.get(page, [])) for page in range(len(pool._owners))] == pool._owners
    assert sorted([*found, *pool._free]) == list(range(len(pool._owners)))
    for sequence in pool._sequences.values():
        assert len(sequence.pages) == -(-sequence.length // pool.page_size)
        assert len(set(sequence.pages)) == len(sequence.pages)


def test_out_of_pages_changes_nothing():
    pool = PagePool(4, 16)
    one, two = pool.add(), pool.add()
    pool.grow([one], [40])
    before = (pool.use(), list(pool.pages_of(one)))
    with pytest.raises(OutOfPagesError, match="2 pages are needed and 1 are free") as caught:
        pool.grow([one, two], [9, 1])
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert (pool.use(), pool.pages_of(one)) == before
    assert (pool.length(one), pool.length(two)) == (40, 0)
    pool.grow([two], [16])
    check(pool)


def test_a_fork_shares_pages_until_one_of_the_two_writes():
    pool = PagePool(8, 16)
    one = pool.add()
    pool.grow([one], [20])
    two = pool.fork(one)
    assert pool.pages_of(two) == pool.pages_of(one)
    assert (pool.use().used, pool.use().shared) == (2, 2)
    shared = pool.pages_of(one)[1]
    ((source, target),) = pool.grow([two], [1])
    assert source == shared == pool.pages_of(one)[1]
    assert target == pool.pages_of(two)[1] != shared
    assert pool.pages_of(one)[0] == pool.pages_of(two)[0]
    assert pool.grow([one], [1]) == []  # it is alone on its last page now
    pool.free(one)
    assert pool.use().used == 2
    check(pool)


def test_of_two_sequences_that_share_a_page_and_both_write_one_keeps_it():
    pool = PagePool(8, 16)
    one = pool.add()
    pool.grow([one], [20])
    two = pool.fork(one)
    assert len(pool.grow([one, two], [1, 1])) == 1
    assert pool.pages_of(one)[1] != pool.pages_of(two)[1]
    check(pool)


def test_a_full_last_page_is_not_copied():
    pool = PagePool(8, 16)
    one = pool.add()
    pool.grow([one], [32])
    two = pool.fork(one)
    assert pool.grow([two], [1]) == []
    assert pool.pages_of(two)[:2] == pool.pages_of(one)
    check(pool)


@pytest.mark.parametrize("length", [-1, 51, 1.0, True, None])
def test_invalid_lengths(length):
    pool = PagePool(8, 16)
    one = pool.add()
    pool.grow([one], [50])
    with pytest.raises(OptionError, match="length"):
        pool.truncate(one, length)


def test_unknown_sequences():
    pool = PagePool(8, 16)
    one = pool.add()
    pool.free(one)
    for number in (one, 7, None, []):
        with pytest.raises(OptionError, match="a sequence number from add or fork"):
            pool.length(number)
    with pytest.raises(OptionError, match="each sequence once"):
        pool.grow([one, one], [1, 1])
    assert pool.add() != one


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_the_invariants(seed):
    r = random.Random(seed)
    pool, alive = PagePool(r.randint(4, 40), r.choice([1, 4, 16])), []
    for _ in range(300):
        what = r.choice(["add", "grow", "grow", "grow", "fork", "truncate", "free"])
        if what == "add" or not alive:
            alive.append(pool.add())
        elif what == "grow":
            some = r.sample(alive, r.randint(1, len(alive)))
            before = pool.use()
            try:
                pool.grow(some, [r.randint(0, 20) for _ in some])
            except OutOfPagesError:
                assert pool.use() == before
        elif what == "fork":
            alive.append(pool.fork(r.choice(alive)))
        elif what == "truncate":
            one = r.choice(alive)
            pool.truncate(one, r.randint(0, pool.length(one)))
        else:
            one = alive.pop(r.randrange(len(alive)))
            pool.free(one)
        check(pool)
    for one in alive:
        pool.free(one)
    assert pool.use().used == 0


def test_forks_of_several_pages_need_no_more_than_they_take():
    pool = PagePool(6, 16)
    pairs = []
    for _ in range(2):
        one = pool.add()
        pool.grow([one], [20])
        pairs += [one, pool.fork(one)]
    assert pool.use().free == 2
    assert len(pool.grow(pairs, [1] * 4)) == 2
    check(pool)


@pytest.mark.parametrize("seed", range(10))
def test_growth_can_be_undone(seed):
    r = random.Random(seed)
    pool = PagePool(60, 4)
    alive = [pool.add() for _ in range(4)]
    pool.grow(alive, [r.randint(0, 12) for _ in alive])
    alive += [pool.fork(r.choice(alive)) for _ in range(4)]
    some = r.sample(alive, 5)
    before = {number: (list(pool.pages_of(number)), pool.length(number)) for number in alive}
    owners, state = list(pool._owners), pool.state_of(some)
    pool.grow(some, [r.randint(0, 9) for _ in some])
    pool.restore(state)
    assert {number: (pool.pages_of(number), pool.length(number)) for number in alive} == before
    assert pool._owners == owners
    check(pool)


class _Broken(BaseException):
    """An exception from a signal handler, such as KeyboardInterrupt."""


def interrupted_at(place, run, whole):
    """Runs a function with an exception before the given opcode of the pool's code. Returns whether it got that far.

    `whole` does the same with another pool, and is run to its end before.
    """
    left = place

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != page_pool.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if left == 0:
                left = -1
                raise _Broken
            left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        left = -1
        whole()  # from Python 3.12 on, opcodes are traced from a function's second call on
        left = place
        run()
    except _Broken:
        return True
    finally:
        sys.settrace(before)
    return left < 0


def shared_pool():
    """Sequences 0 to 3: one of several pages, a fork that shares a page, an empty one, one whose page was copied."""
    pool = PagePool(24, 4)
    for _ in range(3):
        pool.add()
    pool.grow([0, 1], [21, 9])
    pool.fork(0)
    pool.grow([3], [3])
    return pool


CHANGES = {
    "add": lambda pool: pool.add(),
    "fork": lambda pool: pool.fork(1),
    "grow": lambda pool: pool.grow([0, 1, 2, 3], [6, 1, 9, 2]),
    "grow what both share": lambda pool: pool.grow([pool.fork(1), 1], [1, 1]),
    "truncate": lambda pool: pool.truncate(0, 3),
    "evict": lambda pool: pool.truncate(3, 0),
    "free": lambda pool: pool.free(0),
    "restore": lambda pool: pool.restore((pool.state_of([0, 3]), pool.grow([0, 3], [9, 9]))[0]),
}


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 3), reason="this Python traces no opcodes of some functions")
@pytest.mark.parametrize("change", CHANGES)
def test_interruptions_neither_lose_nor_duplicate_pages(change):
    """An exception before every single opcode of every change."""
    for place in itertools.count():
        pool = shared_pool()
        before = {number: (tuple(of.pages), of.length) for number, of in pool._sequences.items()}
        whole = shared_pool()
        broken = interrupted_at(
            place, lambda pool=pool: CHANGES[change](pool), lambda whole=whole: CHANGES[change](whole)
        )
        after = {number: (tuple(of.pages), of.length) for number, of in pool._sequences.items()}
        use = pool.use()
        check(pool)
        lengths = {number: length for number, (_, length) in after.items()}
        assert lengths in [
            {number: length for number, (_, length) in before.items()},
            {number: of.length for number, of in whole._sequences.items()},
            {number: length for number, (_, length) in before.items()} | {4: 9},  # forked, and not grown
            {number: length + 9 * (number in (0, 3)) for number, (_, length) in before.items()},  # not restored
        ], "a half of the change"
        room = pool.grow([pool.add()], [4 * use.free])
        assert room == []
        assert pool.use().free == 0
        check(pool)
        if not broken:
            assert place > 10
            break
