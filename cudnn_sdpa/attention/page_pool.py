"""Which page belongs to which sequence: numbers of the host, without any tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """Pages, who owns them, and how many sequences share each."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))  # the last one is taken first
        self._owners = [0] * pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    def add(self) -> int:
        """A new sequence: its number, which is never used again."""
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence()
        return number

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._of(sequence).length

    def pages_of(self, sequence: int) -> list[int]:
        """Pages of a sequence, in order."""
        return self._of(sequence).pages

    def fork(self, sequence: int) -> int:
        """A new sequence with the same pages."""
        of = self._of(sequence)
        number = self.add()
        self._sequences[number] = _Sequence(list(of.pages), of.length)
        for page in of.pages:
            self._owners[page] += 1
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
        wanted = []
        writers: Counter[int] = Counter()  # of shared pages
        for number, more in zip(sequences, added, strict=True):
            of = self._of(number)
            splits = more > 0 and of.length % self.page_size != 0 and self._owners[of.pages[-1]] > 1
            if splits:
                writers[of.pages[-1]] += 1
            wanted.append((of, more, -(-(of.length + more) // self.page_size) - len(of.pages), splits))
        # If all who share a page write to it, the last of them keeps it.
        copied = sum(min(count, self._owners[page] - 1) for page, count in writers.items())
        needed = copied + sum(new for _, _, new, _ in wanted)
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))
        copies = []
        for of, more, new, splits in wanted:
            if splits and self._owners[of.pages[-1]] > 1:
                copies.append((of.pages[-1], self._split(of)))
            of.pages += [self._take() for _ in range(new)]
            of.length += more
        return copies

    def state_of(self, sequences: list[int]) -> list[tuple[int, list[int], int]]:
        """What `restore` needs to undo what happens to sequences."""
        return [(number, list(self._of(number).pages), self._of(number).length) for number in sequences]

    def restore(self, state: list[tuple[int, list[int], int]]) -> None:
        """Gives sequences the pages and the length that they had, when only `grow` has happened since."""
        for number, pages, _ in state:
            for page in pages:
                self._owners[page] += page not in self._of(number).pages
        for number, pages, length in state:
            of = self._of(number)
            for page in reversed(of.pages):
                if page not in pages:
                    self._give_back(page)
            of.pages, of.length = pages, length

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the tokens after the first `length`, and gives back the pages that only they were in.

        Raises:
            OptionError: There are fewer.
        """
        of = self._of(sequence)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= of.length:
            raise OptionError("length", repr(length), f"an int from 0 to {of.length}, the length of the sequence")
        keep = -(-length // self.page_size)
        for page in reversed(of.pages[keep:]):
            self._give_back(page)
        del of.pages[keep:]
        of.length = length

    def free(self, sequence: int) -> None:
        """Forgets a sequence."""
        self.truncate(sequence, 0)
        del self._sequences[sequence]

    def use(self) -> CacheUse:
        """How full it is."""
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

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _split(self, of: _Sequence) -> int:
        """Gives a sequence a last page of its own."""
        self._owners[of.pages[-1]] -= 1
        of.pages[-1] = self._take()
        return of.pages[-1]

    def _give_back(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)
