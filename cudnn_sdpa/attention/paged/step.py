"""`PagedStep`: what the GPU reads of one step on a paged cache."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged.launch import MARK
from cudnn_sdpa.attention.paged.page_pool import PagePool
from cudnn_sdpa.errors import OptionError


@dataclass(eq=False)
class PagedStep:
    """What attention needs to know of one step: which sequences take part, and where their tokens are.

    Tensors keep their addresses when the step is made anew with `into`, so that a CUDA graph may read them.

    Attributes:
        page_table: Pages of each sequence, (B, max_pages) int32.
        seq_lens_kv: Tokens of each sequence, the new ones included, (B,) int32.
        seq_lens_q: How many tokens are new, (B,) int32.
        positions: Of the new tokens in their sequences, (B, tokens) int64; of absent ones 0.
        numbers: The memory that all of these lie in.
        cache: Of which cache it is, a weak reference.
        has_absent: Whether a sequence that takes part has fewer new tokens than others.
        sequences: Which sequences have new tokens in it, each with its generation then; None if it could not be filled.
        cuts: How often generations had changed when they were last compared.
        written: The layers whose keys have been appended.
    """

    page_table: Tensor
    seq_lens_kv: Tensor
    seq_lens_q: Tensor
    positions: Tensor
    numbers: Tensor = field(repr=False)
    cache: weakref.ref[Any] = field(repr=False)
    has_absent: bool = False
    sequences: list[tuple[int, int | None]] | None = field(default_factory=list, repr=False)
    cuts: int = field(default=-1, repr=False)
    written: set[int] = field(default_factory=set, repr=False)

    @property
    def batch(self) -> int:
        """How many sequences it has room for."""
        return self.page_table.shape[0]

    @property
    def tokens(self) -> int:
        """How many new tokens of a sequence it has room for."""
        return self.positions.shape[1]

    @classmethod
    def new(cls, cache: object, mark: tuple[int, int, int], batch: int, tokens: int, device: torch.device) -> PagedStep:
        """A step of empty sequences.

        In memory it is the positions, in 64 bits, then the lengths and the tables, in 32.

        Args:
            cache: The cache that vouches for what is in it.
            mark: Its pages, pages of a sequence at most, and tokens of a page.
            batch: Sequences that it has room for.
            tokens: New tokens of a sequence that it has room for.
            device: Where it is.
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
        return cls(table, lengths_kv, lengths_q, positions, numbers, weakref.ref(cache))

    def fill(self, rows: list[tuple[list[int], int, int]]) -> None:
        """Fills it, with one copy that nobody waits for; rows that are not given become empty sequences.

        Args:
            rows: Of each sequence its pages, its length with the new tokens, and how many are new.
        """
        batch, tokens = self.batch, self.tokens
        numbers = bytearray(8 * self.numbers.numel())
        positions = memoryview(numbers)[: 8 * batch * tokens].cast("q")
        ints = memoryview(numbers)[8 * batch * tokens :].cast("i")
        for row, (pages, length, more) in enumerate(rows):
            ints[row], ints[batch + row] = length, more
            begin = 2 * batch + row * self.page_table.shape[1]
            ints[begin : begin + len(pages)] = array("i", pages)
            positions[row * tokens : row * tokens + more] = array("q", range(length - more, length))
        self.has_absent = any(more < tokens for _, _, more in rows)
        if not numbers:
            return
        with torch.inference_mode():  # whatever mode it was made in
            host = torch.frombuffer(numbers, dtype=torch.int64)
            self.numbers.copy_(host.pin_memory() if self.numbers.is_cuda else host, non_blocking=True)

    def begin(self, sequences: list[tuple[int, int | None]], cuts: int) -> None:
        """Has it be a step of these sequences with their generations, as of so many cuts, to which nothing is written.

        On a GPU, what was appended to it once counts for ever: a CUDA graph may do so again.
        """
        if not self.numbers.is_cuda:
            self.written.clear()
        self.sequences, self.cuts = sequences, cuts

    def check_current(self, pool: PagePool) -> None:
        """Compares the generations of its sequences, and remembers that they are as they were.

        Raises:
            OptionError: Pages of it may belong to others by now: a sequence was freed or has forgotten tokens since.
        """
        cuts, hint = pool.cuts, "Call reserve again."
        if self.sequences is None:
            raise OptionError("step", "a step whose reserve was broken off", "one that reserve gave", hint)
        for number, generation in self.sequences:
            now = pool.generation(number)
            if now != generation:
                what = "freed" if now is None else "evicted, truncated or given a page of its own"
                got = f"a step of sequence {number}, which has been {what} since"
                raise OptionError("step", got, "a step that was reserved after that", hint)
        self.cuts = cuts

    def check_written(self, layer: int) -> None:
        """Whether there is something new in a layer that attention could see.

        Raises:
            OptionError: The keys of new tokens have not been appended.
        """
        if self.sequences:
            hint = "Or write the pages yourself, and call sdpa_paged with the step's page_table and seq_lens_kv."
            got = f"a step without keys and values of layer {layer}"
            raise OptionError("step", got, "a step that they were appended to: append(step, k, v, layer)", hint)

    def write(self, new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor]) -> None:
        """Writes new keys and values (B, Hkv, tokens, D) into their pages (P, Hkv, page size, D), in plain PyTorch."""
        with torch.inference_mode():
            batch, tokens = torch.nonzero(torch.arange(self.tokens) < self.seq_lens_q.unsqueeze(1), as_tuple=True)
            positions = self.positions[batch, tokens]
            for rows, to in zip(new, pages, strict=True):
                page = self.page_table[batch, positions // to.shape[2]].long()
                to[page, :, positions % to.shape[2]] = rows[batch, :, tokens]
