"""`PagedStep`: page tables, lengths and positions of one step on a paged cache."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged.page_pool import PagePool
from cudnn_sdpa.errors import OptionError

#: The attribute by which a `PagedKVCache` marks the tables and lengths that it made, and `trusted_pages` those of
#: others: valid for caches with as many pages of this size. Its value is (pages, columns of the table, page size).
MARK = "_cudnn_sdpa_pages"
Mark = tuple[int, int, int]


class Row(NamedTuple):
    """A sequence of a step: its number, its pages, its length with the new tokens, and how many these are."""

    sequence: int
    pages: list[int]
    length: int
    added: int


@dataclass(eq=False)
class PagedStep:
    """The metadata of one step: its sequences, and where their tokens are stored.

    `reserve(..., into=step)` keeps the addresses of the tensors, so that a CUDA graph can read them.

    Attributes:
        page_table: Page ids of each sequence, (B, max_pages) int32.
        seq_lens_kv: Length of each sequence, new tokens included, (B,) int32.
        seq_lens_q: Number of new tokens, (B,) int32.
        positions: Positions of the new tokens in their sequences, (B, tokens) int64; 0 for absent ones.
        numbers: The buffer that all of these are views of.
        cache: A weak reference to the cache.
        has_absent: Whether a sequence has fewer new tokens than the step has room for.
        rows: The sequences.
        generation: The pool's when the step was reserved, or was last found to be current; None if `reserve` was
            interrupted.
        written: The layers whose keys have been appended.
    """

    page_table: Tensor
    seq_lens_kv: Tensor
    seq_lens_q: Tensor
    positions: Tensor
    numbers: Tensor = field(repr=False)
    cache: weakref.ref[object] = field(repr=False)
    has_absent: bool = False
    rows: list[Row] = field(default_factory=list, repr=False)
    generation: int | None = field(default=0, repr=False)
    written: set[int] = field(default_factory=set, repr=False)

    @property
    def batch(self) -> int:
        """Maximum number of sequences."""
        return self.page_table.shape[0]

    @property
    def tokens(self) -> int:
        """Maximum number of new tokens per sequence."""
        return self.positions.shape[1]

    @classmethod
    def new(cls, cache: object, mark: tuple[int, int, int], batch: int, tokens: int, device: torch.device) -> PagedStep:
        """A step of empty sequences.

        Its buffer holds the positions as int64, then the lengths and the page table as int32.

        Args:
            cache: The cache.
            mark: The cache's pages, its maximum pages per sequence, and its page size.
            batch: Maximum number of sequences.
            tokens: Maximum number of new tokens per sequence.
            device: Device of the tensors.
        """
        columns = mark[1]
        size = batch * tokens + -(-batch * (columns + 2) // 2)
        with torch.inference_mode(False):  # usable in every mode
            numbers = torch.zeros(size, dtype=torch.int64, device=device)
        positions = numbers[: batch * tokens].view(batch, tokens)
        ints = numbers[batch * tokens :].view(torch.int32)
        lengths_kv, lengths_q, table = ints[:batch], ints[batch : 2 * batch], ints[2 * batch :]
        table = table[: batch * columns].view(batch, columns)
        for tensor in (table, lengths_kv):
            setattr(tensor, MARK, mark)
        return cls(
            page_table=table,
            seq_lens_kv=lengths_kv,
            seq_lens_q=lengths_q,
            positions=positions,
            numbers=numbers,
            cache=weakref.ref(cache),
        )

    def begin(self, rows: list[Row], generation: int) -> None:
        """Assigns sequences, as of the pool's generation, and clears `written`.

        On a GPU `written` stays: a replayed CUDA graph may append again.
        """
        self.generation = None  # until all is done
        self.fill(rows)
        if not self.numbers.is_cuda:
            self.written.clear()
        self.rows, self.generation = rows, generation

    def fill(self, rows: list[Row]) -> None:
        """Fills the tensors with one asynchronous copy; the remaining rows become empty sequences."""
        batch, tokens = self.batch, self.tokens
        numbers = bytearray(8 * self.numbers.numel())
        positions = memoryview(numbers)[: 8 * batch * tokens].cast("q")
        ints = memoryview(numbers)[8 * batch * tokens :].cast("i")
        for row, (_, pages, length, added) in enumerate(rows):
            ints[row], ints[batch + row] = length, added
            begin = 2 * batch + row * self.page_table.shape[1]
            ints[begin : begin + len(pages)] = array("i", pages)
            positions[row * tokens : row * tokens + added] = array("q", range(length - added, length))
        self.has_absent = any(row.added < tokens for row in rows)
        if not numbers:
            return
        with torch.inference_mode():  # independent of the mode that the step was created in
            host = torch.frombuffer(numbers, dtype=torch.int64)
            self.numbers.copy_(host.pin_memory() if self.numbers.is_cuda else host, non_blocking=True)

    def check_current(self, pool: PagePool) -> None:
        """Checks that its sequences still have its pages, and takes over the pool's generation.

        It keeps its own if one of the pages was copied for another sequence, which new keys would not reach.

        Raises:
            OptionError: The step is stale: a sequence was freed, or has lost tokens or pages since.
        """
        hint = "Call reserve again."
        if self.generation is None:
            raise OptionError("step", "a step whose reserve was interrupted", "one that reserve returned", hint)
        is_shared = False
        for sequence, pages, length, added in self.rows:
            if not added:
                continue
            changed = pool.generation_of(sequence)
            if changed is None or changed > self.generation:
                what = "freed" if changed is None else "evicted, truncated or given a page of its own"
                got = f"a step of sequence {sequence}, which has been {what} since"
                raise OptionError("step", got, "a step that was reserved after that", hint)
            new = pages[(length - added) // pool.page_size :]
            is_shared |= any(pool.copied.get(page, 0) > self.generation for page in new)
        if not is_shared:
            self.generation = pool.generation

    def refuse_shared(self) -> NoReturn:
        """Raises the error for keys that a fork's copy of the page would miss."""
        got = "keys and values after a page of the step was copied for a fork, which would miss them"
        raise OptionError("step", got, "all layers of the step before the fork", "Fork after the step.")

    def check_written(self, layer: int) -> None:
        """Checks that a layer's new keys have been appended.

        Raises:
            OptionError: They have not.
        """
        if any(row.added for row in self.rows):
            hint = "Or write the pages yourself, and call sdpa_paged with the step's page_table and seq_lens_kv."
            got = f"a step without keys and values of layer {layer}"
            raise OptionError("step", got, "a step after append(step, k, v, layer)", hint)
