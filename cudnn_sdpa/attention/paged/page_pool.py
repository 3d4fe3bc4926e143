"""Which page belongs to which sequence: numbers of the host, without any tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cudnn_sdpa.errors import OptionError, OutOfPagesError


@dataclass(frozen=True)
class CacheUse:
    """How full a paged cache is.

    Attributes:
        pages: All pages.
        used: Pages that belong to a sequence.
        free: Pages that belong to nobody.
        shared: Pages that belong to several sequences.
        sequences: Sequences.
        tokens: Tokens of all sequences; those of shared pages count for each.
    """

    pages: int
    used: int
    free: int
    shared: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence at one time; nothing in it is ever changed, so that another one takes its place in one assignment.

    Attributes:
        pages: Its pages, in order.
        length: Its tokens.
        generation: Changes when steps of it that were reserved before may write to it no more: when tokens of it are
            forgotten, or its last page becomes another one.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    generation: int = 0


class PagePool:
    """Pages, who owns them, and how many sequences share each.

    What holds is the dictionary of sequences alone, and each change is one assignment in it. Which pages are free, and
    how often a page is owned, follow from it: they are kept up to date with each change, and counted anew if an
    exception (Ctrl-C, a timeout out of a signal handler) broke into one.

    Attributes:
        cuts: How often the generation of any sequence has changed, or a sequence was freed.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.cuts = 0
        self._free = list(range(pages - 1, -1, -1))  # the last one is taken first
        self._owners = [0] * pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._is_counted = True  # whether free pages and owners are those of the sequences

    def add(self) -> int:
        """A new sequence: its number, which is never used again."""
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence()
        return number

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._of(sequence).length

    def pages_of(self, sequence: int) -> list[int]:
        """Pages of a sequence, in order; not to be written to."""
        return self._of(sequence).pages

    def generation(self, sequence: int) -> int | None:
        """What tells whether steps of a sequence are still right; None if it was freed."""
        found = self._sequences.get(sequence)
        return None if found is None else found.generation

    def fork(self, sequence: int) -> int:
        """A new sequence with the same pages."""
        of = self._of(sequence)
        self._count()
        number, self._next = self._next, self._next + 1
        self._is_counted = False
        self._sequences[number] = _Sequence(of.pages, of.length)
        for page in of.pages:
            self._owners[page] += 1
        self._is_counted = True
        return number

    def grow(self, sequences: list[int], added: list[int]) -> list[tuple[int, int]]:
        """Gives each sequence pages for so many more tokens.

        Returns:
            Pages that were shared and are written to now: (from, to), to be copied.

        Raises:
            OutOfPagesError: There are too few. Nothing has changed.
            OptionError: A sequence is not there or there twice, or a number is negative.
        """
        if len(set(sequences)) != len(sequences):
            raise OptionError("sequences", repr(sequences), "each sequence once")
        for more in added:
            if not isinstance(more, int) or isinstance(more, bool) or more < 0:
                raise OptionError("tokens", repr(more), "how many tokens are new, an int from 0")
        self._count()
        wanted = []
        writers: Counter[int] = Counter()  # of shared pages
        for number, more in zip(sequences, added, strict=True):
            of = self._of(number)
            splits = more > 0 and of.length % self.page_size != 0 and self._owners[of.pages[-1]] > 1
            if splits:
                writers[of.pages[-1]] += 1
            wanted.append((number, of, more, -(-(of.length + more) // self.page_size) - len(of.pages), splits))
        # If all who share a page write to it, the last of them keeps it.
        left = {page: min(count, self._owners[page] - 1) for page, count in writers.items()}
        needed = sum(left.values()) + sum(new for _, _, _, new, _ in wanted)
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))
        taken = self._free[len(self._free) - needed :]
        given, copies, grown = list(taken), [], {}
        for number, of, more, new, splits in wanted:
            pages, generation = of.pages, of.generation
            if splits and left[pages[-1]]:
                left[pages[-1]] -= 1
                copies.append((pages[-1], given[-1]))
                pages, generation = [*pages[:-1], given.pop()], generation + 1
            if new:
                pages = [*pages, *(given.pop() for _ in range(new))]
            grown[number] = _Sequence(pages, of.length + more, generation)
        self._is_counted = False
        self._sequences.update(grown)
        del self._free[len(self._free) - needed :]
        for page in taken:
            self._owners[page] = 1
        for page, _ in copies:
            self._owners[page] -= 1
            self.cuts += 1
        self._is_counted = True
        return copies

    def state_of(self, sequences: list[int]) -> dict[int, Any]:
        """What `restore` needs to undo what happens to sequences."""
        return {number: self._of(number) for number in sequences}

    def restore(self, state: dict[int, Any]) -> None:
        """Gives sequences the pages and the length that they had, when only `grow` has happened since."""
        self._is_counted = False
        self._sequences.update(state)
        self._count()

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the tokens after the first `length`, and gives back the pages that only they were in.

        Raises:
            OptionError: There are fewer.
        """
        of = self._of(sequence)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= of.length:
            raise OptionError("length", repr(length), f"an int from 0 to {of.length}, the length of the sequence")
        if length < of.length:
            keep = -(-length // self.page_size)
            self._count()
            self._is_counted = False
            self._sequences[sequence] = _Sequence(of.pages[:keep], length, of.generation + 1)
            self._give_back(of.pages[keep:])

    def free(self, sequence: int) -> None:
        """Forgets a sequence."""
        of = self._of(sequence)
        self._count()
        self._is_counted = False
        del self._sequences[sequence]
        self._give_back(of.pages)

    def use(self) -> CacheUse:
        """How full it is."""
        self._count()
        return CacheUse(
            pages=len(self._owners),
            used=len(self._owners) - len(self._free),
            free=len(self._free),
            shared=sum(owners > 1 for owners in self._owners),
            sequences=len(self._sequences),
            tokens=sum(of.length for of in self._sequences.values()),
        )

    def _of(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except (KeyError, TypeError):
            raise OptionError(
                "sequence", repr(sequence), "a number that add or fork gave, and that was not freed"
            ) from None

    def _count(self) -> None:
        """Counts free pages and owners anew if a change was broken off."""
        if self._is_counted:
            return
        owners = [0] * len(self._owners)
        for of in self._sequences.values():
            for page in of.pages:
                owners[page] += 1
        self._owners = owners
        self._free = [page for page in range(len(owners) - 1, -1, -1) if not owners[page]]
        self.cuts += 1  # whose count may have been missed
        self._is_counted = True

    def _give_back(self, pages: list[int]) -> None:
        """Counts pages out that a sequence has no more; the last part of a change."""
        self.cuts += 1
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        self._is_counted = True
