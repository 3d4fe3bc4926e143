"""`KVCache`: keys and values of a fixed batch in one piece, with lengths that only the GPU knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import value_checks
from cudnn_sdpa.attention.arguments import check_lengths, dtype_name, shape_of
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged.kv_cache_checks import check_count, check_dtype, checked_device, refuse_gradient
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.errors import DeviceError, DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.nn.checks import check_counts


@dataclass(eq=False)
class KVStep:
    """Where the new tokens of one step on a `KVCache` go, and what they see.

    Attributes:
        positions: Of the new tokens in their sequences, (B, tokens) int64; for rotary embeddings.
        seq_lens_kv: Tokens of each sequence, the new ones included, (B,) int32.
        seq_lens_q: How many tokens are new, (B,) int32; None if all are.
        slots: Where they are written, (B, tokens) int64; what has no place goes into a row that nobody reads.
        is_over: Which sequences have become too long, (B, 1, 1, 1) booleans: their output is NaN.
        of: The cache.
        is_used: Whether keys have been appended.
        written: Of which layers, outside compiled functions.
    """

    positions: Tensor
    seq_lens_kv: Tensor
    seq_lens_q: Tensor | None
    slots: Tensor = field(repr=False)
    is_over: Tensor = field(repr=False)
    of: KVCache = field(repr=False)
    is_used: bool = field(default=False, repr=False)
    written: set[int] = field(default_factory=set, repr=False)

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self.positions.shape[0]

    @property
    def tokens(self) -> int:
        """How many new tokens of a sequence there are at most."""
        return self.positions.shape[1]

    def cache(self) -> KVCache:
        """The cache that it belongs to."""
        return self.of


class KVCache:
    """Keys and values of a batch of sequences in one tensor for each layer: the static cache of a model.

    Every sequence has room for `max_length` tokens from the beginning. Lengths are on the GPU and are never read back:
    a CUDA graph or a compiled function that reserves, appends and attends goes on with longer sequences at each call.
    For many sequences that come and go there is `PagedKVCache`.

    A sequence that outgrows `max_length` raises on the CPU, and under `CUDNN_SDPA_DEBUG=1`. On the GPU nobody knows
    in time: its output is NaN from then on, until `reset`.

    What is reserved counts as tokens from then on. A step that is never appended, because a call failed for instance,
    is taken back with `cancel`; outside compiled functions the next `reserve` insists on that.

    Args:
        batch: Sequences.
        heads: Heads of keys and values.
        head_dim: Size of a head.
        max_length: Most tokens of a sequence.
        layers: Layers of the model; all share the lengths.
        dtype: Of keys and values.
        device: Where they are; the current GPU if there is one.

    Raises:
        OptionError: A size is none.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, num_kv_heads=2, is_causal=True).eval()
        >>> cache = cudnn_sdpa.nn.KVCache(
        ...     batch=2, heads=2, head_dim=16, max_length=32, dtype=torch.float32, device="cpu"
        ... )
        >>> x = torch.randn(2, 8, 64)
        >>> with torch.no_grad():
        ...     prompt = attention(x[:, :5], step=cache.reserve(5))
        ...     rest = [attention(x[:, i : i + 1], step=cache.reserve()) for i in range(5, 8)]
        ...     torch.allclose(torch.cat([prompt, *rest], dim=1), attention(x), atol=1e-5)
        True
        >>> cache.lengths
        tensor([8, 8], dtype=torch.int32)
    """

    def __init__(
        self,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        max_length: int,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
    ) -> None:
        check_counts(batch=batch, heads=heads, head_dim=head_dim, max_length=max_length, layers=layers)
        device = checked_device(device)
        check_dtype(dtype, device, "")
        self.batch, self.heads, self.head_dim, self.max_length = batch, heads, head_dim, max_length
        # The last row takes what has no place; attention does not see it.
        shape = (batch, heads, max_length + 1, head_dim)
        with torch.inference_mode(False):  # or nobody could write to it in another mode
            self._pairs = [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(layers)
            ]
            self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._rows = torch.arange(batch, device=device).unsqueeze(1)
        self.dtype, self.device = dtype, self._lengths.device
        self._newest: KVStep | None = None
        self._version = self._lengths._version  # of the lengths behind which no number is left

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, (B,) int32.

        Always the same memory, which compiled functions and CUDA graphs read. May be written to in place, with smaller
        numbers too: the next `reserve` notices, without waiting, and clears what is behind them. Code that Python does
        not run notices nothing: before a graph is captured or replayed, or a compiled function reserves, make lengths
        smaller by `truncate`, `reset` or `cache.lengths -= …`, which clear at once. What an overflow has left behind
        would give NaN otherwise.
        """
        return self._lengths

    @lengths.setter
    def lengths(self, value: Tensor) -> None:
        if value is not self._lengths:  # `lengths -= 1` gives the tensor itself
            hint = "Write into it: cache.lengths.copy_(…)."
            raise OptionError("lengths", "another tensor", "the one that the cache has", hint)
        self._clear()

    def k(self, layer: int = 0) -> Tensor:
        """The keys of a layer, (B, Hkv, max_length, D)."""
        return self._pair(layer)[0][:, :, : self.max_length]

    def v(self, layer: int = 0) -> Tensor:
        """The values of a layer, (B, Hkv, max_length, D)."""
        return self._pair(layer)[1][:, :, : self.max_length]

    def _pair(self, layer: int) -> tuple[Tensor, Tensor]:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(self._pairs):
            raise OptionError("layer", repr(layer), f"a layer from 0 to {len(self._pairs) - 1}")
        return self._pairs[layer]

    def reset(self) -> None:
        """Forgets all tokens."""
        self._lengths.zero_()
        self._newest = None
        self._clear()

    def truncate(self, lengths: Tensor) -> None:
        """Forgets the tokens of each sequence after the first so many, such as drafts that were wrong; nothing waits.

        Args:
            lengths: How many each sequence keeps, (B,) int32; one that has fewer keeps all.

        Raises:
            ArgumentError: It is no tensor of lengths.
        """
        if lengths is None:
            raise OptionError("lengths", "None", "a torch.Tensor of B int32")
        check_lengths("lengths", lengths, self._rows, "the cache")
        torch.minimum(self.lengths, lengths.clamp_min(0), out=self._lengths)
        self._newest = None
        self._clear()

    def _clear(self) -> None:
        """Writes zeros behind the lengths: an infinity that is left there times a weight of 0 would be NaN."""
        behind = torch.arange(self.max_length + 1, device=self.device) >= self.lengths.unsqueeze(1)
        for rows in (part for pair in self._pairs for part in pair):
            rows.masked_fill_(behind[:, None, :, None], 0)
        if not is_compiling():
            self._version = self._lengths._version

    def reserve(self, tokens: int = 1, seq_lens: Tensor | None = None) -> KVStep:
        """Makes room for new tokens at the end of every sequence, and says where they go.

        Args:
            tokens: How many new tokens there are.
            seq_lens: How many of them each sequence has, (B,) int32, if they differ: the first ones.

        Returns:
            The step, for `append` and `attend` of each layer, or for the modules' argument `step`.

        Raises:
            ArgumentError: A number is wrong, the step before was not appended, or a sequence becomes longer than
                `max_length`, where that is known.
        """
        check_count("tokens", tokens)
        if not is_compiling() and self._newest is not None and not self._newest.is_used:
            hint = "Use it, or take it back: cache.cancel(step), or cache.reset()."
            raise OptionError("tokens", "a second step", "that the keys of the step before are appended first", hint)
        offsets = torch.arange(tokens, device=self.device)
        check_lengths("seq_lens", seq_lens, self._rows, "the cache")
        if not is_compiling() and (self.device.type == "cpu" or (value_checks.enabled and not _is_capturing())):
            self._check_room(tokens, seq_lens)
        if not is_compiling() and self._lengths._version != self._version and not _is_capturing():
            self._clear()  # somebody has written to the lengths; a capture would clear in each replay
        positions = self.lengths.unsqueeze(1) + offsets
        found = positions < self.max_length
        if seq_lens is not None:
            found = found & (offsets < seq_lens.unsqueeze(1))
        self._lengths.add_(tokens if seq_lens is None else seq_lens)
        if not is_compiling():
            self._version += 1  # of this library's own write
        lengths = self._lengths.clone()  # the next step changes the cache's own
        is_over = lengths > self.max_length
        # What follows a layer's NaN is NaN, too, and must not stay where shorter sequences are padded with it.
        slots = positions.masked_fill(~found | is_over.unsqueeze(1), self.max_length)
        step = KVStep(positions, lengths, seq_lens, slots, is_over.view(-1, 1, 1, 1), self)
        if not is_compiling():
            self._newest = step
        return step

    def cancel(self, step: KVStep) -> None:
        """Takes the newest step back, whose call has failed: its tokens are forgotten.

        Args:
            step: What `reserve` gave last, outside a compiled function.

        Raises:
            OptionError: It is another one.
        """
        self._own(step)
        if step is not self._newest:
            raise OptionError("step", "another step", "the newest one that this cache has reserved")
        self._lengths.sub_(step.tokens if step.seq_lens_q is None else step.seq_lens_q)
        self._newest = None
        self._clear()

    def _check_room(self, tokens: int, seq_lens: Tensor | None) -> None:
        new = [tokens] * self.batch if seq_lens is None else seq_lens.tolist()
        for length, more in zip(self.lengths.tolist(), new, strict=True):
            if not 0 <= more <= tokens:
                raise OptionError("seq_lens", repr(more), f"numbers from 0 to {tokens}, as there are tokens")
            if length + more > self.max_length:
                room = f"at most max_length ({self.max_length}) tokens in total"
                raise OptionError("tokens", f"{more} after {length}", room)

    def append(self, step: KVStep, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Writes the keys and values of a step's new tokens.

        Args:
            step: What `reserve` gave.
            k: Keys (B, Hkv, tokens, D), in the dtype of the cache.
            v: Values, likewise.
            layer: Of which layer they are.

        Raises:
            ArgumentError: They do not fit.
            UnsupportedError: They require a gradient.
        """
        self._own(step)
        expected = (self.batch, self.heads, step.tokens, self.head_dim)
        for name, rows in (("k", k), ("v", v)):
            if tuple(rows.shape) != expected:
                raise ShapeError(name, shape_of(rows), f"shape {expected}: (B, Hkv, tokens, head dim)")
            if rows.dtype != self.dtype:
                raise DtypeError(name, dtype_name(rows.dtype), f"{dtype_name(self.dtype)}, the dtype of the cache")
            if rows.device != self.device:
                raise DeviceError(name, str(rows.device), f"{self.device}, where the cache is")
        if needs_gradient(k, v):
            refuse_gradient("a KVCache")
        pair = self._pair(layer)
        self._mark(step, layer)
        for rows, to in zip((k, v), pair, strict=True):
            to[self._rows, :, step.slots] = rows.transpose(1, 2)

    def attend(self, step: KVStep, q: Tensor, layer: int = 0, **options: Any) -> Tensor:
        """Attention of a step's new tokens on all tokens of their sequences.

        Args:
            step: What `reserve` gave; its keys and values have been appended.
            q: Queries (B, Hq, tokens, D).
            layer: On which layer's keys and values.
            options: Those of `sdpa`: window, scale, softcap, sinks, attn_mask. The causal mask is on unless
                `is_causal=False` is given, which a step of several tokens needs beside `attn_mask` on every GPU: the
                mask, (B or 1, Hq or 1, tokens, max_length), has to hide later keys itself then. A step of one token
                with `softcap` is refused, since cuDNN computes that wrongly with lengths; with `seq_lens_kv=None` and
                an `attn_mask` that hides what lies behind each length it runs.

        Returns:
            The output (B, Hq, tokens, D).
        """
        self._own(step)
        lengths = {"seq_lens_q": step.seq_lens_q, "seq_lens_kv": step.seq_lens_kv}
        options = {"is_causal": True, "causal_alignment": "bottom_right", **lengths, **options}
        out: Tensor = sdpa(q, self.k(layer), self.v(layer), **options)
        fill = out.masked_fill if out.requires_grad else out.masked_fill_  # a backward pass needs the output as it is
        return fill(step.is_over, float("nan"))

    def _mark(self, step: KVStep, layer: int) -> None:
        """Remembers that a layer of a step is written, which nobody does twice; a compiler does not ask."""
        if not is_compiling():
            if layer in step.written:
                expected = "another layer: this one has the step's keys already"
                raise OptionError("layer", repr(layer), expected, "Each layer of a model gives its own number.")
            step.written.add(layer)
        step.is_used = True

    def _own(self, step: Any) -> None:
        if not isinstance(step, KVStep) or step.of is not self:
            raise OptionError("step", type(step).__name__, "a KVStep that this cache has made")


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
