"""`KVCache`: contiguous keys and values of a fixed batch, with lengths that stay on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from cudnn_sdpa.attention.arguments import check_lengths
from cudnn_sdpa.attention.dense.sdpa import SdpaOptions, sdpa
from cudnn_sdpa.attention.paged.kv_cache_checks import (
    check_count,
    check_dtype,
    check_queries,
    checked_device,
    refuse_gradient,
    refuse_options,
)
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_tensor
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.nn.checks import check_counts


@dataclass(eq=False)
class KVStep:
    """One step on a `KVCache`: where its new tokens are written, and what they attend to.

    Attributes:
        positions: Positions of the new tokens in their sequences, (B, tokens) int64; for rotary embeddings.
        seq_lens_kv: Length of each sequence including the new tokens, (B,) int32.
        seq_lens_q: Number of new tokens of each sequence, (B,) int32; None if it is `tokens` for all.
        slots: Rows of the cache for the new tokens, (B, tokens) int64; unused tokens share a spare row.
        is_over: Sequences that have become too long, (B, 1, 1, 1) booleans: their output is NaN.
        owner: The cache.
        generation: The cache's generation at `reserve`; None in compiled functions.
        written: The layers with appended keys; not updated in compiled functions.
        is_compiled: Whether a compiled function has appended keys, of layers that `written` lacks.
    """

    positions: Tensor
    seq_lens_kv: Tensor
    seq_lens_q: Tensor | None
    slots: Tensor = field(repr=False)
    is_over: Tensor = field(repr=False)
    owner: KVCache = field(repr=False)
    generation: int | None = field(repr=False)
    written: set[int] = field(default_factory=set, repr=False)
    is_compiled: bool = field(default=False, repr=False)

    def may_lack(self, layer: int) -> bool:
        return layer not in self.written and not self.is_compiled

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.positions.shape[0]

    @property
    def tokens(self) -> int:
        """Maximum number of new tokens of a sequence."""
        return self.positions.shape[1]

    def cache(self) -> KVCache:
        """The cache of the step."""
        return self.owner


class KVCache:
    """Keys and values of a batch of sequences in one tensor per layer: the static cache of a model.

    Every sequence has room for `max_length` tokens from the start. Lengths stay on the GPU and are never read back. A
    CUDA graph or a compiled function can therefore reserve, append and attend: each replay or call extends the
    sequences. For serving, where sequences start and end at any time, use `PagedKVCache`.

    A sequence that exceeds `max_length` raises on the CPU, and under `CUDNN_SDPA_DEBUG=1`. On the GPU, where lengths
    are not read back, its output is NaN until `reset`.

    `reserve` extends the lengths at once. If keys and values of the step are never appended, or not in all layers, for
    instance because a call failed, undo it with `cancel`. Otherwise the next `reserve` raises, except in compiled
    functions.

    Args:
        batch: Number of sequences.
        heads: Number of key and value heads.
        head_dim: Head dim.
        max_length: Maximum length of a sequence.
        layers: Number of layers; all share the lengths.
        dtype: Of keys and values.
        device: Of keys and values; None is the current GPU if there is one.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, num_kv_heads=2, is_causal=True).eval().bfloat16()
        >>> cache = cudnn_sdpa.nn.KVCache(batch=2, heads=2, head_dim=16, max_length=32, device="cpu")
        >>> x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
        >>> with torch.no_grad():
        ...     prompt = attention(x[:, :5], step=cache.reserve(5))
        ...     rest = [attention(x[:, i : i + 1], step=cache.reserve()) for i in range(5, 8)]
        ...     torch.allclose(torch.cat([prompt, *rest], dim=1), attention(x), atol=0.05)
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
        # Tokens without a row are written to the last one, which attention does not read.
        shape = (batch, heads, max_length + 1, head_dim)
        with torch.inference_mode(False):  # tensors of inference mode cannot be written to outside it
            self._pairs = [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(layers)
            ]
            self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._rows = torch.arange(batch, device=device).unsqueeze(1)
        self.dtype, self.device = dtype, self._lengths.device
        self._newest: KVStep | None = None
        self._generation = 0  # number of removals of tokens: earlier steps are stale
        self._version = self._lengths._version  # of the lengths when rows past them were last cleared

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle or a copy, which may be made in inference mode."""
        self.__dict__.update(state)
        with torch.inference_mode(False):
            self._pairs = [(_writable(k), _writable(v)) for k, v in self._pairs]
            self._lengths, self._rows = _writable(self._lengths), _writable(self._rows)
        self._version = -1  # the next step clears rows past the lengths, whatever was done to the original

    @property
    def lengths(self) -> Tensor:
        """Length of each sequence, (B,) int32.

        Always the same tensor, which compiled functions and CUDA graphs read. You may modify it in place, also to
        smaller lengths: the next `reserve` detects that, without synchronizing, and clears the rows past them. CUDA
        graphs and compiled functions do not detect it. Before a capture, a replay or such a call, reduce lengths with
        `truncate`, `reset` or `cache.lengths -= …`, which clear at once. Otherwise the NaN of an overflow would remain.
        """
        return self._lengths

    @lengths.setter
    def lengths(self, value: Tensor) -> None:
        if value is not self._lengths:  # `lengths -= 1` gives the tensor itself
            hint = "Write into it: cache.lengths.copy_(…)."
            raise OptionError("lengths", "another tensor", "the cache's own lengths", hint)
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
        """Removes all tokens."""
        self._lengths.zero_()
        self._clear_after_removal()

    def truncate(self, lengths: Tensor) -> None:
        """Shortens sequences, for instance after rejected draft tokens; does not synchronize.

        Args:
            lengths: New length of each sequence, (B,) int32; shorter sequences stay as they are.

        Raises:
            ArgumentError: `lengths` is not such a tensor.
        """
        if lengths is None:
            raise OptionError("lengths", "None", "a torch.Tensor of B int32")
        check_lengths("lengths", lengths, self._rows, "the cache")
        torch.minimum(self.lengths, lengths.clamp_min(0), out=self._lengths)
        self._clear_after_removal()

    def _clear_after_removal(self) -> None:
        self._newest = None
        if not is_compiling():
            self._generation += 1
        self._clear()

    def _clear(self) -> None:
        """Writes zeros past the lengths: an infinity there, times an attention weight of 0, would be NaN."""
        is_past = torch.arange(self.max_length + 1, device=self.device) >= self.lengths.unsqueeze(1)
        for rows in (part for pair in self._pairs for part in pair):
            rows.masked_fill_(is_past[:, None, :, None], 0)
        if not is_compiling():
            self._version = self._lengths._version

    def reserve(self, tokens: int = 1, seq_lens: Tensor | None = None) -> KVStep:
        """Reserves rows for new tokens at the end of every sequence.

        Args:
            tokens: Number of new tokens.
            seq_lens: Number of new tokens of each sequence, (B,) int32, if they differ; the first ones are used.

        Returns:
            The step, for `append` and `attend` of each layer, or for the modules' argument `step`.

        Raises:
            ArgumentError: An argument is wrong, the previous step was not appended, or a sequence exceeds `max_length`,
                where that is known.
        """
        check_count("tokens", tokens)
        if not is_compiling() and self._newest is not None:
            missing = [layer for layer in range(len(self._pairs)) if self._newest.may_lack(layer)]
            if missing:
                expected = f"that the keys of the previous step are appended first; layers without: {missing}"
                hint = "Append them, or undo the step, as after a failed call: cache.cancel(step), or cache.reset()."
                raise OptionError("tokens", "a second step", expected, hint)
        offsets = torch.arange(tokens, device=self.device)
        check_lengths("seq_lens", seq_lens, self._rows, "the cache")
        if not is_compiling() and (self.device.type == "cpu" or (value_checks.enabled and not _is_capturing())):
            self._check_room(tokens, seq_lens)
        if not is_compiling() and self._lengths._version != self._version and not _is_capturing():
            self._clear()  # the user has modified the lengths; a capture would clear in every replay
        positions = self.lengths.unsqueeze(1) + offsets
        has_row = positions < self.max_length
        if seq_lens is not None:
            has_row = has_row & (offsets < seq_lens.unsqueeze(1))
        self._lengths.add_(tokens if seq_lens is None else seq_lens)
        if not is_compiling():
            self._version += 1  # for the write above, which is not the user's
        lengths = self._lengths.clone()  # the next step changes the cache's lengths in place
        is_over = lengths > self.max_length
        # Layers after a NaN produce NaN keys, too; they must not be written to rows that shorter sequences read as
        # padding.
        slots = positions.masked_fill(~has_row | is_over.unsqueeze(1), self.max_length)
        step = KVStep(
            positions=positions,
            seq_lens_kv=lengths,
            seq_lens_q=None if seq_lens is None else seq_lens.clone(),  # the caller may refill it
            slots=slots,
            is_over=is_over.view(-1, 1, 1, 1),
            owner=self,
            generation=None if is_compiling() else self._generation,
        )
        if not is_compiling():
            self._newest = step
        return step

    def cancel(self, step: KVStep) -> None:
        """Undoes the last step, for instance after a failed call: its tokens are removed.

        Args:
            step: The last result of `reserve`, outside a compiled function.

        Raises:
            OptionError: `step` is not the last one.
        """
        self._check_owner(step)
        if step is not self._newest:
            raise OptionError("step", "another step", "the last one that this cache has reserved")
        self._lengths.sub_(step.tokens if step.seq_lens_q is None else step.seq_lens_q)
        self._clear_after_removal()

    def _check_room(self, tokens: int, seq_lens: Tensor | None) -> None:
        new = [tokens] * self.batch if seq_lens is None else seq_lens.tolist()
        for length, more in zip(self.lengths.tolist(), new, strict=True):
            if not 0 <= more <= tokens:
                raise OptionError("seq_lens", repr(more), f"numbers from 0 to {tokens}, the number of tokens")
            if length + more > self.max_length:
                room = f"at most max_length ({self.max_length}) tokens in total"
                raise OptionError("tokens", f"{more} after {length}", room)

    def append(self, step: KVStep, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Writes the keys and values of a step's new tokens.

        Args:
            step: A step of `reserve`.
            k: Keys (B, Hkv, tokens, D), in the dtype of the cache.
            v: Values, likewise.
            layer: Their layer.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: Keys or values require a gradient.
        """
        self._check_owner(step)
        pair = self._pair(layer)
        expected = (self.batch, self.heads, step.tokens, self.head_dim)
        for name, rows in (("k", k), ("v", v)):
            check_is_tensor(name, rows)
            check_tensor(name, rows, pair[0], of="the cache", shape=expected, meaning="(B, Hkv, tokens, head dim)")
        if needs_gradient(k, v):
            refuse_gradient("a KVCache")
        if not is_compiling() and layer in step.written:
            other = "another layer: this one has the step's keys already"
            raise OptionError("layer", repr(layer), other, "Each layer of a model passes its own number.")
        for rows, cached in zip((k, v), pair, strict=True):
            cached[self._rows, :, step.slots] = rows.transpose(1, 2)
        if is_compiling():
            step.is_compiled = True
        else:  # after both are written: a failure or an interruption leaves the layer to be appended again
            step.written.add(layer)

    def attend(self, step: KVStep, q: Tensor, layer: int = 0, **options: Unpack[SdpaOptions]) -> Tensor:
        """Attention of a step's new tokens on all tokens of their sequences.

        Args:
            step: A step of `reserve` whose keys and values have been appended.
            q: Queries (B, Hq, tokens, D).
            layer: The layer of keys and values.
            options: Options of `sdpa`. The mask is causal unless `is_causal=False` is passed. A step of several tokens
                with `attn_mask` needs `is_causal=False`; the mask, (B or 1, Hq or 1, tokens, max_length), must then
                mask later keys itself. Options that `sdpa` refuses with lengths run with `seq_lens_kv=None` and an
                `attn_mask` that masks the keys past each length.

        Returns:
            The output (B, Hq, tokens, D).

        Raises:
            CudnnSdpaError: As by `sdpa`; or the step has no keys of this layer, or is stale: tokens were removed since.
        """
        self._check_owner(step)
        keys, values = self.k(layer), self.v(layer)
        if not is_compiling():
            if step.may_lack(layer):
                got = f"a step without keys and values of layer {layer}"
                raise OptionError("step", got, "a step after append(step, k, v, layer)")
            if not options.keys() <= SdpaOptions.__optional_keys__:
                refuse_options(options, SdpaOptions.__optional_keys__)
        check_queries(q, step.tokens)
        sdpa_options: SdpaOptions = {
            "is_causal": True,
            "causal_alignment": "bottom_right",
            "seq_lens_q": step.seq_lens_q,
            "seq_lens_kv": step.seq_lens_kv,
            **options,
        }
        out = sdpa(q, keys, values, **sdpa_options)
        fill = out.masked_fill if out.requires_grad else out.masked_fill_  # backward needs the unmodified output
        return fill(step.is_over, float("nan"))

    def _check_owner(self, step: object) -> None:
        if not isinstance(step, KVStep) or step.owner is not self:
            raise OptionError("step", type(step).__name__, "a KVStep of this cache")
        if not is_compiling() and step.generation not in (None, self._generation):
            expected = "one that was reserved after the last cancel, reset or truncate"
            raise OptionError("step", "a stale step", expected, "Reserve another: step = cache.reserve(…).")


def _writable(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
