"""Latent attention by the native core."""

from collections.abc import Callable

from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.packed_rows.layout import EIGHT_BIT, is_packed, row_bytes
from perilune.ops.packed_rows.native import row_code
from perilune.ops.paged import pages
from perilune.ops.registry import OpKey


def mla_prefill(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """Plain form over all visible rows, absorbed form over a selection; see the package's contract."""
    return _attend(core().mla_prefill, q, rows, block_table, seq_lens, cu_seqlens, w_uk, w_uv, scale, selected)


def mla_decode(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """Absorbed form; see the package's contract."""
    return _attend(core().mla_decode, q, rows, block_table, seq_lens, cu_seqlens, w_uk, w_uv, scale, selected)


def _attend(
    kernel: Callable[..., None],
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    q, rows, block_table = q.contiguous(), rows.contiguous(), block_table.contiguous()
    w_uk, w_uv = _rows_contiguous(w_uk), _rows_contiguous(w_uv)
    num_tokens, heads, query = q.shape
    _, key, latent = w_uk.shape
    value, num_selected = w_uv.shape[1], 0
    if selected is not None:
        selected, num_selected = selected.contiguous(), selected.shape[1]
    o = q.new_empty(num_tokens, heads, value)
    sequences = (address(cu_seqlens), 0, seq_lens.shape[0])
    weights = (address(w_uk), address(w_uv), code(w_uk), w_uk.stride(0), w_uv.stride(0))
    sizes = (heads, key, query - key, latent, value)
    kernel(
        address(q),
        code(q),
        heads * query,
        pages(rows, block_table, seq_lens),
        row_code(rows),
        sequences,
        *weights,
        *sizes,
        scale,
        address(selected),
        num_selected,
        address(o),
    )
    return o


def _rows_contiguous(weight: Tensor) -> Tensor:
    """[H, D, R] whose heads may lie apart, but each in one piece."""
    return weight if weight.stride()[1:] == (weight.shape[2], 1) else weight.contiguous()


def supports(key: OpKey) -> str | None:
    """Widths in multiples of 16; one dtype, float32 or bfloat16, but that rows may be packed in 8 bits."""
    _, width, latent, value, query, row = key.sizes  # any number of heads
    own = (key.dtypes[0],)
    reason = refusal(key, multiples=(width, latent, value, query))
    reason = reason or refuse_types(key, ACTIVATIONS, (*own, *EIGHT_BIT), own, own)
    if reason is not None:
        return reason
    columns = latent + query - width
    expected = row_bytes(key.dtypes[1], latent, columns) if is_packed(key.dtypes[1]) else columns
    return None if row == expected else f"a row must have {expected} elements, not {row}"
