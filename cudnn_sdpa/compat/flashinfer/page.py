"""Paged caches as FlashInfer has them: lists of pages end to end, and new tokens that are appended."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged.append import append_paged_kv
from cudnn_sdpa.compat.flashinfer.arguments import INDICES, NHD, PagedCache, called, check_layout
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor, shape_of
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph.scalars import is_integer


def pages_of(paged_kv_cache: PagedCache, kv_layout: str, name: str = "paged_kv_cache") -> tuple[Tensor, Tensor]:
    """The pages of keys and of values; caches without a dimension for the page size have pages of one token."""
    pair = paged_kv_cache
    if isinstance(pair, Tensor):
        if pair.dim() not in (4, 5) or pair.shape[1] != 2:
            raise ShapeError(name, shape_of(pair), "(pages, 2, …) of rank 5, or 4 for pages of one token")
        pair = pair.unbind(1)  # type: ignore[assignment]
    if not isinstance(pair, (tuple, list)) or [isinstance(x, Tensor) for x in pair] != [True, True]:
        raise OptionError(name, repr(type(pair)), "a tensor (pages, 2, …), or one of keys and one of values")
    k, v = pair
    if k.dim() == v.dim() == 3:
        one = 1 if kv_layout == NHD else 2
        return k.unsqueeze(one), v.unsqueeze(one)
    return k, v


def names_of_pages(paged_kv_cache: PagedCache, name: str = "paged_kv_cache") -> dict[str, str]:
    """The caller's names for the pages of keys and of values."""
    before = ":, " if isinstance(paged_kv_cache, Tensor) else ""
    return {"k_pages": f"{name}[{before}0]", "v_pages": f"{name}[{before}1]"}


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The number of keys of each sequence.

    Args:
        kv_indptr: Where the pages of each sequence begin and end, (B + 1,).
        kv_last_page_len: The number of keys in its last page, (B,).
        page_size: Tokens per page.

    Returns:
        The lengths, (B,). Without pages, that of the last page.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import get_seq_lens
        >>> get_seq_lens(torch.tensor([0, 3, 4]), torch.tensor([5, 16]), 16).tolist()
        [37, 16]
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequence of each new token and its position there, if new tokens are the last ones of their sequences.

    The host reads no value, so a captured CUDA graph can be replayed with others.

    Args:
        append_indptr: Where the new tokens of each sequence begin and end, (B + 1,).
        seq_lens: The length of each sequence with its new tokens, (B,).
        nnz: The number of new tokens, padding behind them included.
        batch_indices: Where the sequences are written, (nnz,) int32.
        positions: Where the positions are written, (nnz,) int32.

    Returns:
        The sequences and the positions, (nnz,) int32 each; -1 and 0 for padding.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import get_batch_indices_positions
        >>> sequences, positions = get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 7]), 4)
        >>> sequences.tolist(), positions.tolist()
        ([0, 1, 1, -1], [4, 5, 6, 0])
    """
    into = {"batch_indices": batch_indices, "positions": positions}
    check_are_tensors({"append_indptr": append_indptr, "seq_lens": seq_lens, **into}, optional=into)
    if not is_integer(nnz) or nnz < 0:
        raise OptionError("nnz", repr(nnz), "an int of at least 0")
    check_tensor("append_indptr", append_indptr, append_indptr, shape=("B + 1",))
    batch = append_indptr.shape[0] - 1
    of = "append_indptr"
    check_tensor("seq_lens", seq_lens, append_indptr, of=of, dtype=INDICES, shape=(batch,))
    for name, x in into.items():
        check_tensor(name, x, append_indptr, of=of, dtype=torch.int32, shape=(nnz,))
    ends = append_indptr[1:]
    token = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    sequence = torch.searchsorted(ends, token, right=True)
    is_there = (sequence < batch) & (token >= append_indptr[0])
    of_token = sequence.clamp(max=batch - 1)
    found = (
        torch.where(is_there, sequence, -1),
        torch.where(is_there, seq_lens[of_token] - ends[of_token] + token, 0) if batch else torch.zeros_like(token),
    )
    made = [x.int() if to is None else to.copy_(x) for x, to in zip(found, into.values(), strict=True)]
    return made[0], made[1]


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values of new tokens into their pages, in place, as `cudnn_sdpa.append_paged_kv`.

    The host reads no value, so a captured CUDA graph can be replayed with others. Tokens of the sequence -1 are
    skipped. Those at positions that their sequence has no page for are skipped on a GPU, and refused on the CPU and if
    the environment variable `CUDNN_SDPA_DEBUG` is 1.

    Args:
        append_key: Keys (tokens, heads, head dim).
        append_value: Values, likewise.
        batch_indices: The sequence of each token, as `get_batch_indices_positions` gives it.
        positions: Its position in that.
        paged_kv_cache: The cache: a pair of pages of keys and of values, or one tensor (pages, 2, …).
        kv_indices: The pages of all sequences, end to end.
        kv_indptr: Where the pages of each sequence begin and end, (B + 1,). They have room for the new tokens.
        kv_last_page_len: Not read: positions say where tokens go.
        kv_layout: "NHD" for pages (pages, page size, heads, head dim), or "HND".

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: Keys or values require grad.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import append_paged_kv_cache
        >>> cache = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16)  # pages of 16 tokens
        >>> k, v = torch.randn(2, 1, 2, 64, dtype=torch.bfloat16)
        >>> sequence, position, last, indptr, pages = (torch.tensor(x) for x in ([0], [17], [2], [0, 2], [3, 1]))
        >>> append_paged_kv_cache(k, v, sequence, position, cache, pages, indptr, last)
        >>> torch.equal(cache[1, 0, 1], k[0])
        True
    """
    layout = check_layout(kv_layout)
    k_pages, v_pages = pages_of(paged_kv_cache, layout)
    lists = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    check_are_tensors({"append_key": append_key, "append_value": append_value, **lists})
    names = names_of_pages(paged_kv_cache)
    check_tensor(names["k_pages"], k_pages, k_pages, shape=("pages", "", "", "head dim"))
    tokens = append_key.shape[0]
    for name, x in lists.items():
        shape = (tokens,) if name in ("batch_indices", "positions") else ("entries",)
        check_tensor(name, x, append_key, of="append_key", dtype=INDICES, shape=shape)
    if not tokens:
        return
    for name, least in (("kv_indices", 1), ("kv_indptr", 2)):
        if lists[name].shape[0] < least:
            raise ShapeError(name, shape_of(lists[name]), "pages for the new tokens")
    page_size = k_pages.shape[1 if layout == NHD else 2]
    sequence, position = batch_indices.long(), positions.long()
    known = sequence.clamp(0, kv_indptr.shape[0] - 2)
    entry = kv_indptr.long()[known] + position // page_size
    is_there = (sequence == known) & (position >= 0) & (entry < kv_indptr[known + 1])
    page = kv_indices.long()[entry.clamp(0, kv_indices.shape[0] - 1)]
    beyond = torch.where(sequence < 0, -1, k_pages.shape[0] * page_size)
    slots = torch.where(is_there, page * page_size + position % page_size, beyond)
    names |= {
        "k": "append_key",
        "v": "append_value",
        "slot_mapping": "positions",
        "append_paged_kv": "append_paged_kv_cache",
    }
    of_slots = {"slot_mapping": slots, "page_layout": layout}
    called(append_paged_kv, append_key, append_value, k_pages, v_pages, names=names, **of_slots)
