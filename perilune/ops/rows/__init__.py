"""Rows of activations between the heavy ops.

embed_rows(weight, ids, dtype) -> y [T, D] in dtype: rows ids [T] of weight [V, D]. IndexError for an id past its end.
store_rows(pool, slots, rows): row slots[t] of pool [..., D], counted over all leading dims, becomes rows[t] [T, D],
    rounded to the pool's dtype; in place.
append_rows(pool, end, rows): rows [T, D] become rows end[0] and on of pool [P, D], rounded to its dtype, and end [1]
    int64 grows by T; in place. IndexError where they do not fit, with nothing written.
join_rows(*parts) -> y [T, D]: parts [T_i, D] of one dtype, end to end.
add_rows(x, z) -> x + z, both of one shape and dtype.
gate_rows(x, gate) -> x * sigmoid(gate), both of one shape and dtype; the sigmoid is rounded to it too.
scale_rows(x, factor) -> x * factor in float32.
swiglu(gate, up) -> gate * sigmoid(gate), rounded to their dtype, times up; both of one shape.
"""

import torch

from perilune.ops._native import register
from perilune.ops.registry import Op, OpKey, tensor_key
from perilune.ops.rows import native, reference


def _embed_key(weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> OpKey:
    device, dtypes, sizes, needs_grad = tensor_key(weight, ids, sizes=weight.shape)
    return OpKey(device, (*dtypes, dtype), sizes, needs_grad)


embed_rows = Op("embed_rows", reference.embed_rows, key=_embed_key)
store_rows = Op(
    "store_rows",
    reference.store_rows,
    key=lambda pool, slots, rows: tensor_key(pool, slots, rows, sizes=(rows.shape[-1], pool.is_contiguous())),
)
append_rows = Op(
    "append_rows",
    reference.append_rows,
    key=lambda pool, end, rows: tensor_key(pool, end, rows, sizes=(rows.shape[-1], pool.is_contiguous())),
)
join_rows = Op("join_rows", reference.join_rows, key=lambda *parts: tensor_key(*parts))
add_rows = Op("add_rows", reference.add_rows, key=lambda x, z: tensor_key(x, z))
gate_rows = Op("gate_rows", reference.gate_rows, key=lambda x, gate: tensor_key(x, gate))
scale_rows = Op("scale_rows", reference.scale_rows, key=lambda x, factor: tensor_key(x))
swiglu = Op("swiglu", reference.swiglu, key=lambda gate, up: tensor_key(gate, up))

register(embed_rows, native.embed_rows, native.supports_embed_rows)
register(store_rows, native.store_rows, native.supports_store_rows)
register(append_rows, native.append_rows, native.supports_store_rows)
register(join_rows, native.join_rows, native.supports_join_rows)
register(add_rows, native.add_rows, native.supports_pair)
register(gate_rows, native.gate_rows, native.supports_pair)
register(scale_rows, native.scale_rows, native.supports_scale_rows)
register(swiglu, native.swiglu, native.supports_pair)
