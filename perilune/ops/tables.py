"""The case tables of all ops, by the op's name."""

from typing import Any

from perilune.ops.attn_res import cases as attn_res
from perilune.ops.case import CaseTable
from perilune.ops.conv import cases as conv
from perilune.ops.gqa import cases as gqa
from perilune.ops.indexer import cases as indexer
from perilune.ops.kda import cases as kda
from perilune.ops.linear import cases as linear
from perilune.ops.mla import cases as mla
from perilune.ops.moe import cases as moe
from perilune.ops.mxfp4 import cases as mxfp4
from perilune.ops.norm import cases as norm
from perilune.ops.packed_rows import cases as packed_rows
from perilune.ops.rotary import cases as rotary
from perilune.ops.rows import cases as rows
from perilune.ops.sampling import cases as sampling
from perilune.ops.vision import cases as vision

CASE_TABLES: dict[str, CaseTable[Any]] = {
    **attn_res.TABLES,
    **conv.TABLES,
    **gqa.TABLES,
    **indexer.TABLES,
    **kda.TABLES,
    **linear.TABLES,
    **mla.TABLES,
    **moe.TABLES,
    **mxfp4.TABLES,
    **norm.TABLES,
    **packed_rows.TABLES,
    **rotary.TABLES,
    **rows.TABLES,
    **sampling.TABLES,
    **vision.TABLES,
}
