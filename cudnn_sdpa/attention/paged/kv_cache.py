"""`PagedKVCache`: pages of keys and values of many sequences, and which sequence owns which page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.paged import kv_cache_checks, paging
from cudnn_sdpa.attention.paged.append import write_tokens
from cudnn_sdpa.attention.paged.arguments import HND, PageLayout, as_bits, check_page_layout, in_heads_order
from cudnn_sdpa.attention.paged.kv_cache_checks import AttendOptions, PlanOptions, StepOptions
from cudnn_sdpa.attention.paged.page_pool import CacheUse, PagePool
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.paged.step import PagedStep, Row
from cudnn_sdpa.attention.paged.step_plans import plans_of_steps
from cudnn_sdpa.errors import DeviceError, ExecutionError, OptionError
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.manifest import PlanManifest


class PagedKVCache:
    """Keys and values of many sequences in fixed-size pages, for one or more layers.

    The host assigns pages to sequences, and sends the page tables to the GPU with each step, in one asynchronous copy.
    It is not thread-safe.

    Append the keys and values of a step's tokens, of all layers, before you fork their sequences or reserve another
    step for them. The step's tables and lengths are read without checks, so do not write to them. A step is refused if
    one of its sequences was freed, evicted or truncated since; so are keys once a fork has a copy of the step's page.

    Args:
        pages: Number of pages.
        page_size: Tokens per page, such as 16 or 64. cuDNN reads powers of two; other sizes, and pages in FP8, are read
            by a kernel of this library.
        heads: Number of heads of keys and values.
        head_dim: Head dim of keys.
        layers: Number of layers of the model; all share the page tables.
        head_dim_v: Head dim of values; `head_dim` if not given.
        max_length: Maximum tokens per sequence; as many as all pages hold if not given.
        dtype: Dtype of keys and values: float16 or bfloat16; float32 or float64 if `cpu_checks` accepts any dtype.
            float8_e4m3fn or float8_e5m2: `append` quantizes, and `attend` takes queries in float16 or bfloat16.
        device: Device of the pages; the current GPU if there is one.
        page_layout: "HND", pages are (pages, heads, page_size, head_dim), or "NHD", (pages, page_size, heads,
            head_dim).
        k_scale: Of a cache in FP8: the scale of keys, on its device; float32, () or (1,) for all heads, or (heads,).
            What is stored is the key divided by it. 1 if not given.
        v_scale: The scale of values.

    Attributes:
        k_scale: The scale of keys, which may be replaced as long as the cache is empty; None if it is 1.
        v_scale: The scale of values.

    Raises:
        OptionError: A size is invalid, or there is no such device.
        DtypeError: Attention on pages does not support the dtype.
        DeviceError: The device is neither a CUDA GPU nor the CPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> sizes = {"pages": 8, "page_size": 16, "heads": 2, "head_dim": 64}
        >>> cache = cudnn_sdpa.PagedKVCache(**sizes, device="cpu")
        >>> one, two = cache.add(), cache.add()
        >>> step = cache.reserve([one, two], tokens=5)  # a prompt of five tokens each
        >>> k = v = torch.randn(2, 2, 5, 64, dtype=torch.bfloat16)
        >>> cache.append(step, k, v)
        >>> out = cache.attend(step, torch.randn(2, 8, 5, 64, dtype=torch.bfloat16))
        >>> cache.length(one), cache.use().used
        (5, 2)
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        layers: int = 1,
        head_dim_v: int | None = None,
        max_length: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        page_layout: PageLayout = HND,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"pages": pages, "page_size": page_size, "heads": heads, "head_dim": head_dim, "layers": layers}
        kv_cache_checks.check_sizes({**sizes, "head_dim_v": head_dim_v}, max_length, dtype)
        device = kv_cache_checks.checked_device(device)
        if dtype not in FP8_DTYPES:
            kv_cache_checks.check_dtype(dtype, device, "")
        check_page_layout(page_layout)
        self.page_layout: PageLayout = page_layout
        self._pool = PagePool(pages, page_size)
        self._columns = pages if max_length is None else -(-max_length // page_size)
        self._mark = pages, self._columns, page_size
        page_shape = (heads, page_size) if page_layout == HND else (page_size, heads)
        self._k, self._v = (
            torch.zeros((layers, pages, *page_shape, dim), dtype=dtype, device=device) for dim in (head_dim, head_dim_v)
        )
        self.device = self._k.device
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            kv_cache_checks.check_scale_of(name, scale, heads, self._k)
        self.k_scale, self.v_scale = k_scale, v_scale
        self._set_up()

    def _set_up(self) -> None:
        self._layers = list(zip(self._k.unbind(), self._v.unbind(), strict=True))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_layers"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update({"k_scale": None, "v_scale": None, **state})  # pickles before FP8 have none
        self._set_up()  # a pickle holds no views

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._pool.page_size

    @property
    def max_length(self) -> int:
        """Maximum tokens per sequence."""
        return self._columns * self.page_size

    def k_pages(self, layer: int = 0) -> Tensor:
        """The keys of a layer, in the cache's layout."""
        return self._layers[self._checked(layer)][0]

    def v_pages(self, layer: int = 0) -> Tensor:
        """The values of a layer, in the cache's layout."""
        return self._layers[self._checked(layer)][1]

    def _checked(self, layer: int) -> int:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self._k.shape[0]:
            raise OptionError("layer", repr(layer), f"a layer from 0 to {self._k.shape[0] - 1}")
        return layer

    def add(self) -> int:
        """Adds an empty sequence and returns its number."""
        return self._pool.add()

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence."""
        return self._pool.length(sequence)

    def fork(self, sequence: int) -> int:
        """Adds a sequence with the same tokens and returns its number. Pages are shared, and copied on write."""
        return self._pool.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the last tokens of a sequence, such as rejected ones in speculative decoding."""
        self._pool.truncate(sequence, length)

    def evict(self, sequence: int) -> int:
        """Frees the pages of a sequence, which stays as an empty one; returns how many tokens it had."""
        length = self._pool.length(sequence)
        self._pool.truncate(sequence, 0)
        return length

    def free(self, sequence: int) -> None:
        """Removes a sequence and frees its pages."""
        self._pool.free(sequence)

    def use(self) -> CacheUse:
        """How full the cache is."""
        return self._pool.use()

    def new_step(self, batch: int, tokens: int = 1) -> PagedStep:
        """A step with room for `batch` sequences and `tokens` new tokens each, to pass to `reserve`."""
        kv_cache_checks.check_count("batch", batch)
        kv_cache_checks.check_count("tokens", tokens)
        return PagedStep.new(cache=self, mark=self._mark, batch=batch, tokens=tokens, device=self.device)

    def reserve(
        self, sequences: Sequence[int], tokens: int | Sequence[int] = 1, *, into: PagedStep | None = None
    ) -> PagedStep:
        """Reserves slots for new tokens at the end of sequences.

        Args:
            sequences: Numbers of the sequences, without duplicates.
            tokens: Number of new tokens, one for all sequences or one for each.
            into: The step to write into, with enough room; its other rows become empty sequences. A new one if not
                given.

        Returns:
            The step: `into`, or a new one.

        Raises:
            OutOfPagesError: There are too few free pages. Nothing has changed.
            OptionError: A number is invalid, a sequence is missing or duplicate, or would be longer than `max_length`.
        """
        numbers, added = kv_cache_checks.checked_growth(sequences, tokens, self._pool.length, self.max_length)
        step = self.new_step(len(numbers), max(added, default=0)) if into is None else self._own(into, "into")
        if len(numbers) > step.batch or max(added, default=0) > step.tokens:
            got = f"room for {step.batch} sequences and {step.tokens} tokens"
            raise OptionError("into", got, f"room for {len(numbers)} sequences and {max(added)} tokens")
        if step.numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ExecutionError("reserve cannot be captured in a CUDA graph: the host assigns the pages of each step")
        before = self._pool.state_of(numbers)
        try:
            copies = self._pool.grow(numbers, added)
            if copies:
                paging.copy_pages((self._k, self._v), copies)
            rows = [
                Row(number, self._pool.pages_of(number), self._pool.length(number), more)
                for number, more in zip(numbers, added, strict=True)
            ]
            step.begin(rows, self._pool.generation)
        except BaseException:
            self._pool.restore(before)
            raise
        return step

    def _own(self, step: object, name: str = "step") -> PagedStep:
        if not isinstance(step, PagedStep) or step.cache() is not self:
            raise OptionError(name, type(step).__name__, "a PagedStep that this cache has made")
        return step

    def _current(self, step: PagedStep) -> None:
        self._own(step)
        if step.generation != self._pool.generation and not is_compiling():
            step.check_current(self._pool)

    def append(self, step: PagedStep, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Writes the keys and values of a step's new tokens into their pages.

        Args:
            step: What `reserve` returned.
            k: Keys (B, Hkv, tokens, D), in the dtype of the cache, float16 or bfloat16 if that is FP8; those of absent
                tokens are not read.
            v: Values (B, Hkv, tokens, Dv).
            layer: The layer.

        Raises:
            ArgumentError: They do not fit, or a sequence of the step was freed, evicted or truncated since, or its page
                copied for a fork that would miss them.
            UnsupportedError: They require grad.
        """
        write_tokens(k, v, *self._places_of(step, layer))
        step.written.add(layer)

    def _places_of(self, step: PagedStep, layer: int) -> tuple[Tensor | str | int | None, ...]:
        """The pages and slots of a step's tokens: the fields of an `AppendCall` behind keys and values."""
        self._current(step)
        if not is_compiling() and step.generation != self._pool.generation:
            step.refuse_shared()
        tables = step.page_table, step.seq_lens_kv, step.seq_lens_q
        options = self.k_scale, self.v_scale, self.page_layout, step.tokens
        return self.k_pages(layer), self.v_pages(layer), None, *tables, *options

    @overload
    def attend(
        self,
        step: PagedStep,
        q: Tensor,
        layer: int = ...,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[StepOptions],
    ) -> Tensor: ...

    @overload
    def attend(
        self, step: PagedStep, q: Tensor, layer: int = ..., *, return_lse: Literal[True], **options: Unpack[StepOptions]
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def attend(
        self, step: PagedStep, q: Tensor, layer: int = ..., *, return_lse: bool, **options: Unpack[StepOptions]
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def attend(
        self, step: PagedStep, q: Tensor, layer: int = 0, **options: Unpack[AttendOptions]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of a step's new tokens on all tokens of their sequences: `sdpa_paged` on this cache.

        Rows without a new token are zeros, but undefined in a CUDA graph of single tokens.

        Args:
            step: What `reserve` returned; its keys and values have been appended.
            q: Queries (B, Hq, tokens, D).
            layer: The layer.
            options: Options of `sdpa_paged` that are not tensors of the cache.

        Returns:
            What `sdpa_paged` returns.

        Raises:
            CudnnSdpaError: As by `sdpa_paged`; or the step has no keys of this layer, or is stale (see `append`).
        """
        self._current(step)
        k_pages, v_pages = self.k_pages(layer), self.v_pages(layer)
        if layer not in step.written and not is_compiling():
            step.check_written(layer)
        if options and not options.keys() <= kv_cache_checks.OPTIONS:
            kv_cache_checks.refuse_options(options)
        kv_cache_checks.check_queries(q, step.tokens)
        # A step of several tokens in a graph may have absent ones in a later replay.
        present = step.seq_lens_q if step.tokens > 1 or step.has_absent else None
        return sdpa_paged(
            q,
            k_pages,
            v_pages,
            page_table=step.page_table,
            seq_lens_kv=step.seq_lens_kv,
            seq_lens_q=present,
            page_layout=self.page_layout,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            **options,
        )

    def plans(
        self, q: Tensor, batches: Iterable[int], tokens: Iterable[int] = (1,), **options: Unpack[PlanOptions]
    ) -> PlanManifest:
        """The plans of all steps with these batch sizes and numbers of new tokens, to warm up.

        Args:
            q: Queries of a step (B, Hq, tokens, D) as the model makes them; with two tokens or more if they are
                head-major.
            batches: All batch sizes that may occur, such as `range(1, 65)`. Most share a plan.
            tokens: All maximum numbers of new tokens per sequence that may occur.
            options: Those of `attend`, except `out`.

        Returns:
            A manifest, which `warmup` takes.

        Raises:
            ArgumentError: An argument is wrong, or the cache is not on a GPU.
            UnsupportedError: cuDNN has no plan for one of them.
        """
        if self.device.type != "cuda":
            raise DeviceError("device", str(self.device), "a CUDA device: calls on other devices have no plans")
        return plans_of_steps(
            cache=self, q=q, batches=batches, tokens=tokens, options=options, target=live_target(self._k.get_device())
        )

    def read(self, sequence: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Copies of the keys (Hkv, length, D) and values (Hkv, length, Dv) of a sequence."""
        numbers = torch.tensor(self._pool.pages_of(sequence), dtype=torch.int64, device=self.device)
        length = self._pool.length(sequence)
        pages = (as_bits(in_heads_order(x, self.page_layout)) for x in (self.k_pages(layer), self.v_pages(layer)))
        k, v = (x[numbers].view(self._k.dtype).transpose(0, 1).flatten(1, 2)[:, :length] for x in pages)
        return k, v
