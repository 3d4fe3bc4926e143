"""The page allocator: which sequence owns which page, on the host, without tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cudnn_sdpa.errors import OptionError, OutOfPagesError


@dataclass(frozen=True)
class CacheUse:
    """How full a paged cache is.

    Attributes:
        pages: Number of pages.
        used: Pages that a sequence owns.
        free: Pages that no sequence owns.
        shared: Pages that several sequences own.
        sequences: Number of sequences.
        tokens: Tokens of all sequences; those in shared pages count once per sequence.
    """

    pages: int
    used: int
    free: int
    shared: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence's state. It is immutable, so that one assignment replaces it.

    Attributes:
        generation: The pool's when the sequence last lost tokens, or its last page was replaced: steps from before are
            stale.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    generation: int = 0


class PagePool:
    """Pages, their owners, and how many sequences share each.

    The dictionary of sequences is the only source of truth, and each change is one assignment in it. The free list and
    the reference counts follow from it: each change updates them, and they are recounted if an exception (Ctrl-C, a
    timeout from a signal handler) interrupted a change.

    Attributes:
        generation: Counts the changes that make steps stale: tokens dropped, pages replaced, sequences freed.
        copied: The pages that were copied for one of their owners, and the generation since the last such copy.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.generation = 0
        self.copied: dict[int, int] = {}
        self._free = list(range(pages - 1, -1, -1))  # the last one is taken first
        self._owners = [0] * pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._is_counted = True  # whether free list and owner counts are up to date

    def add(self) -> int:
        """Adds a sequence and returns its number, which is never reused."""
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence()
        return number

    def length(self, sequence: int) -> int:
        return self._lookup(sequence).length

    def pages_of(self, sequence: int) -> list[int]:
        """Pages of a sequence, in order; do not modify."""
        return self._lookup(sequence).pages

    def generation_of(self, sequence: int) -> int | None:
        """The generation of a sequence: steps from before are stale. None if it was freed."""
        known = self._sequences.get(sequence)
        return None if known is None else known.generation

    def fork(self, sequence: int) -> int:
        source = self._lookup(sequence)
        self._count()
        number, self._next = self._next, self._next + 1
        self._is_counted = False
        self._sequences[number] = _Sequence(source.pages, source.length)
        for page in source.pages:
            self._owners[page] += 1
        self._is_counted = True
        return number

    def grow(self, sequences: list[int], added: list[int]) -> list[tuple[int, int]]:
        """Allocates pages for new tokens of each sequence.

        Returns:
            Shared pages that are written to now, to be copied: (from, to).

        Raises:
            OutOfPagesError: There are too few free pages. Nothing has changed.
            OptionError: A sequence is missing or duplicate.
        """
        if len(set(sequences)) != len(sequences):
            raise OptionError("sequences", repr(sequences), "each sequence once")
        self._count()
        requests = []
        writers: Counter[int] = Counter()  # of shared pages
        for number, more in zip(sequences, added, strict=True):
            old = self._lookup(number)
            splits = more > 0 and old.length % self.page_size != 0 and self._owners[old.pages[-1]] > 1
            if splits:
                writers[old.pages[-1]] += 1
            requests.append((number, old, more, -(-(old.length + more) // self.page_size) - len(old.pages), splits))
        # If all owners of a shared page write to it, the last one keeps it.
        left = {page: min(count, self._owners[page] - 1) for page, count in writers.items()}
        needed = sum(left.values()) + sum(new for _, _, _, new, _ in requests)
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))
        taken = self._free[len(self._free) - needed :]
        unused, copies, grown, next_generation = list(taken), [], {}, self.generation + 1
        for number, old, more, new, splits in requests:
            pages, generation = old.pages, old.generation
            if splits and left[pages[-1]]:
                left[pages[-1]] -= 1
                copies.append((pages[-1], unused[-1]))
                pages, generation = [*pages[:-1], unused.pop()], next_generation
            if new:
                pages = [*pages, *(unused.pop() for _ in range(new))]
            grown[number] = _Sequence(pages, old.length + more, generation)
        self._is_counted = False
        self._sequences.update(grown)
        del self._free[len(self._free) - needed :]
        for page in taken:
            self._owners[page] = 1
        for page, _ in copies:
            self._owners[page] -= 1
            self.generation = self.copied[page] = next_generation
        self._is_counted = True
        return copies

    def state_of(self, sequences: list[int]) -> dict[int, _Sequence]:
        """The state of sequences, for `restore`."""
        return {number: self._lookup(number) for number in sequences}

    def restore(self, state: dict[int, _Sequence]) -> None:
        """Restores the pages and lengths of sequences after an interrupted `grow`."""
        self._is_counted = False
        self._sequences.update(state)
        self._count()

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens after the first `length` and frees the pages that become empty."""
        old = self._lookup(sequence)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= old.length:
            raise OptionError("length", repr(length), f"an int from 0 to {old.length}, the length of the sequence")
        if length < old.length:
            keep = -(-length // self.page_size)
            self._count()
            self._is_counted = False
            self._sequences[sequence] = _Sequence(old.pages[:keep], length, self.generation + 1)
            self._release(old.pages[keep:])

    def free(self, sequence: int) -> None:
        old = self._lookup(sequence)
        self._count()
        self._is_counted = False
        del self._sequences[sequence]
        self._release(old.pages)

    def use(self) -> CacheUse:
        self._count()
        return CacheUse(
            pages=len(self._owners),
            used=len(self._owners) - len(self._free),
            free=len(self._free),
            shared=sum(owners > 1 for owners in self._owners),
            sequences=len(self._sequences),
            tokens=sum(sequence.length for sequence in self._sequences.values()),
        )

    def _lookup(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except (KeyError, TypeError):
            raise OptionError(
                "sequence", repr(sequence), "a sequence number from add or fork that was not freed"
            ) from None

    def _count(self) -> None:
        """Recounts free pages and owners if a change was interrupted."""
        if self._is_counted:
            return
        owners = [0] * len(self._owners)
        for sequence in self._sequences.values():
            for page in sequence.pages:
                owners[page] += 1
        self._owners = owners
        self._free = [page for page in range(len(owners) - 1, -1, -1) if not owners[page]]
        self.generation += 1  # the interrupted change may not have counted itself
        self._is_counted = True

    def _release(self, pages: list[int]) -> None:
        """Decrements the owner counts of pages that a sequence has lost; the last part of a change."""
        self.generation += 1
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        self._is_counted = True
