"""Bench cases of the mixers: KDA, latent attention, indexer, convolution, attention of drafts and among patches."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from perilune.bench.case import CONTEXTS, HEADS, TOKENS, WIDTH, BenchCase, Builder, rotated
from perilune.bench.ceilings import Work
from perilune.ops.case import Layout, scattered_slots, tensors_in
from perilune.ops.conv import cases as conv
from perilune.ops.gqa import cases as gqa
from perilune.ops.kda import cases as kda
from perilune.ops.mla import cases as mla
from perilune.ops.packed_rows.cases import packed_pool
from perilune.ops.packed_rows.layout import DTYPES, EIGHT_BIT
from perilune.ops.rotary import cases as rotary
from perilune.ops.vision import cases as vision

_SHARED, _KV_RANK = 64, 512
_ROW = _KV_RANK + _SHARED
_INDEX_HEADS, _INDEX_WIDTH, _TOPK = 32, 128, 2048
_BLOCK = 16
# a published draft of K3
_DRAFT_HEADS, _GROUPS, _HEAD_WIDTH = 64, 16, 64
_PATCHES, _TOWER_HEADS = (1024, 4096), 12
# decay, delta rule, update and read-out of one state entry, as in models/accounting.py
_FLOPS_PER_STATE_ENTRY = 7


def kda_decay(generator: torch.Generator) -> Iterator[BenchCase]:
    """Elementwise on what a projection has just written."""
    for tokens in TOKENS:
        case = kda.DecayCase(name="", rows=tokens, heads=HEADS, width=WIDTH).in_bfloat16()
        arguments = kda.decay_arguments(case, generator)
        work = Work(arguments[0].nbytes, 0)
        yield BenchCase("kda_decay", f"{tokens} tokens", (arguments,), work, is_cached=True)


def _kda(op: str, layout: Layout, generator: torch.Generator) -> BenchCase:
    """States lie in seats of their own; a few sequences take turns with enough others."""
    case = kda.AttentionCase(name="", layout=layout, heads=HEADS, width=WIDTH).in_bfloat16()
    arguments = kda.attention_arguments(case, generator)
    state, slots = arguments[6], arguments[7]
    assert state is not None
    seats = [(state, slots)] if len(layout.new) > 8 else rotated((state[slots], torch.arange(len(slots))))
    entries = HEADS * WIDTH * WIDTH
    state_bytes = len(layout.new) * entries * 4
    inputs = sum(tensor.nbytes for tensor in arguments[:5])
    return BenchCase(
        op,
        f"{len(layout.new)} sequence(s) of {layout.new[0]}",
        tuple((*arguments[:6], *seat, arguments[8]) for seat in seats),
        Work(state_bytes + inputs, _FLOPS_PER_STATE_ENTRY * entries * layout.num_tokens, "float32"),
    )


def kda_recurrent(generator: torch.Generator) -> Iterator[BenchCase]:
    """Decode: the states are read, and written back as well, which the bound leaves out."""
    for batch in (1, 4, 16, 64):
        yield _kda("kda_recurrent", Layout((1,) * batch, (9,) * batch), generator)


def kda_chunk(generator: torch.Generator) -> Iterator[BenchCase]:
    """Prompts; operations are counted as the recurrence has them."""
    for tokens in (16, 64, 512):
        yield _kda("kda_chunk", Layout((tokens,), (9,)), generator)


def kda_mix(generator: torch.Generator) -> Iterator[BenchCase]:
    """A layer between its projections: decode of several sequences, and prompts."""
    layouts = [Layout((1,) * batch, (9,) * batch) for batch in (1, 4, 16, 64)]
    layouts += [Layout((tokens,), (9,)) for tokens in (16, 64, 512)]
    entries = HEADS * WIDTH * WIDTH
    for layout in layouts:
        case = kda.MixCase(name="", layout=layout, heads=HEADS, width=WIDTH).in_bfloat16()
        *given, state, conv_state, slots, cu_seqlens = kda.mix_arguments(case, generator)
        own = (state[slots], conv_state[slots])
        states_bytes, inputs_bytes = (sum(tensor.nbytes for tensor in tensors_in(part)) for part in (own, given))
        yield BenchCase(
            "kda_mix",
            f"{len(layout.new)} sequence(s) of {layout.new[0]}",
            tuple((*given, *seats, torch.arange(len(slots)), cu_seqlens) for seats in rotated(own)),
            Work(states_bytes + inputs_bytes, _FLOPS_PER_STATE_ENTRY * entries * layout.num_tokens, "float32"),
        )


def kda_verify(generator: torch.Generator) -> Iterator[BenchCase]:
    """A token and seven drafts of several sequences; each state is read once."""
    for batch in (1, 4, 16):
        layout = Layout((8,) * batch, (9,) * batch)
        case = kda.MixCase(name="", layout=layout, heads=HEADS, width=WIDTH).in_bfloat16()
        *given, state, conv_state, slots, cu_seqlens, records = kda.verify_arguments(case, generator)
        own, entries = (state[slots], conv_state[slots]), HEADS * WIDTH * WIDTH
        read = sum(tensor.nbytes for part in (own, given) for tensor in tensors_in(part))
        calls = tuple((*given, *seats, torch.arange(batch), cu_seqlens, records) for seats in rotated(own))
        work = Work(read, _FLOPS_PER_STATE_ENTRY * entries * layout.num_tokens, "float32")
        yield BenchCase("kda_verify", f"{batch} sequence(s) of 8", calls, work)


def kda_commit(generator: torch.Generator) -> Iterator[BenchCase]:
    """Four of eight tokens; the states are written back as well, which the bound leaves out."""
    for batch in (1, 4):
        layout, layers = Layout((8,) * batch, (9,) * batch), 6
        sizes = kda.CommitCase(name="", layout=layout, counts=(4,) * batch, heads=HEADS, width=WIDTH, layers=layers)
        arguments = kda.commit_arguments(sizes.in_bfloat16(), generator)
        entries = layers * batch * HEADS * WIDTH * WIDTH
        work = Work(4 * entries, 3 * 4 * entries, "float32")
        yield BenchCase("kda_commit", f"{layers} layers, {batch} sequence(s)", tuple(rotated(arguments)), work)


def short_conv(generator: torch.Generator) -> Iterator[BenchCase]:
    """q, k and v side by side."""
    for layout in (Layout((1,), (9,)), Layout((1,) * 16, (9,) * 16), Layout((64,), (0,)), Layout((512,), (0,))):
        case = conv.ConvCase(name="", layout=layout, channels=3 * HEADS * WIDTH).in_bfloat16()
        arguments = conv.arguments(case, generator)
        name = f"{len(layout.new)} sequence(s) of {layout.new[0]}"
        work = Work(arguments[0].nbytes, 8 * arguments[0].numel(), "float32")
        yield BenchCase("short_conv", name, (arguments,), work, is_cached=True)


def _absorbed_flops(layout: Layout, num_rows: int) -> float:
    per_row = HEADS * 2 * (_ROW + _KV_RANK)
    return layout.num_tokens * (num_rows * per_row + 2 * HEADS * 2 * WIDTH * _KV_RANK)


def _expanded_flops(layout: Layout, num_rows: int) -> float:
    expansion = len(layout.new) * num_rows * 2 * HEADS * 2 * WIDTH * _KV_RANK
    return expansion + layout.num_tokens * num_rows * HEADS * 2 * (2 * WIDTH + _SHARED)


def _latent(
    op: str, layout: Layout, topk: int | None, generator: torch.Generator, values: torch.dtype | None = None
) -> BenchCase:
    """What the cheaper form of attention must compute; rows and both halves of kv_b are read."""
    case = mla.LatentCase(
        name="",
        layout=layout,
        heads=HEADS,
        nope=WIDTH,
        shared=_SHARED,
        latent=_KV_RANK,
        value=WIDTH,
        block_size=_BLOCK,
        topk=topk,
        values=values,
    ).in_bfloat16()
    q, rows, table, seq_lens, cu_seqlens, w_uk, w_uv, scale, selected = mla.arguments(case, generator)
    context = int(seq_lens[0])
    seen = context if topk is None else min(topk, context)
    read_rows = len(layout.new) * (context if topk is None else min(context, topk * layout.new[0]))
    work = Work(
        read_rows * rows.shape[-1] * rows.element_size() + w_uk.nbytes + w_uv.nbytes + q.nbytes,
        min(_absorbed_flops(layout, seen), _expanded_flops(layout, context)),
    )
    places = rotated((rows, w_uk, w_uv))
    return BenchCase(
        op,
        f"{len(layout.new)} x {layout.new[0]} tokens at {context}"
        + (f", {topk} selected" if topk else "")
        + _packed(values),
        tuple((q, own, table, seq_lens, cu_seqlens, uk, uv, scale, selected) for own, uk, uv in places),
        work,
    )


def _packed(values: torch.dtype | None) -> str:
    return "" if values is None else f", {str(values).removeprefix('torch.')} rows"


def mla_decode(generator: torch.Generator) -> Iterator[BenchCase]:
    """One token per sequence, over all rows and over those that an indexer selected."""
    for context in CONTEXTS:
        for values in (None, *EIGHT_BIT):
            yield _latent("mla_decode", Layout((1,), (context - 1,)), None, generator, values)
            yield _latent("mla_decode", Layout((1,), (context - 1,)), _TOPK, generator, values)
    yield _latent("mla_decode", Layout((1,) * 4, (CONTEXTS[0] - 1,) * 4), None, generator)
    yield _latent("mla_decode", Layout((1,) * 16, (CONTEXTS[0] - 1,) * 16), None, generator)


def mla_prefill(generator: torch.Generator) -> Iterator[BenchCase]:
    """Pieces of a prompt."""
    for tokens, context in ((16, 512), (64, 4096), (512, 512), (512, 4096), (512, 32768)):
        yield _latent("mla_prefill", Layout((tokens,), (context - tokens,)), None, generator)
    yield _latent("mla_prefill", Layout((64,), (CONTEXTS[1] - 64,)), _TOPK, generator)


def _index_rows(context: int, values: torch.dtype | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    num_blocks, table = scattered_slots(context // _BLOCK, generator)
    keys = torch.randn(num_blocks * _BLOCK, _INDEX_WIDTH, generator=generator).to(torch.bfloat16)
    return packed_pool(keys.view(num_blocks, _BLOCK, _INDEX_WIDTH), values, _INDEX_WIDTH), table[None]


def indexer_topk(generator: torch.Generator) -> Iterator[BenchCase]:
    """One sequence; scores need one multiplication more for each head's weight."""
    for context, tokens, values in product(CONTEXTS, (1, 64), (None, *DTYPES)):
        keys, table = _index_rows(context, values, generator)
        q = torch.randn(tokens, _INDEX_HEADS, _INDEX_WIDTH, generator=generator).to(torch.bfloat16)
        weights = torch.randn(tokens, _INDEX_HEADS, generator=generator)
        place = (table, torch.tensor([context]), torch.tensor([0, tokens]))
        row_bytes = keys.shape[-1] * keys.element_size()
        yield BenchCase(
            "indexer_topk",
            f"{tokens} tokens at {context}, top {_TOPK}" + _packed(values),
            tuple((q, weights, own, *place, _TOPK) for own in rotated(keys)),
            Work(context * row_bytes, tokens * context * _INDEX_HEADS * 2 * (_INDEX_WIDTH + 1)),
        )


def patch_attention(generator: torch.Generator) -> Iterator[BenchCase]:
    """A picture of each size; every patch sees all."""
    for patches in _PATCHES:
        case = vision.PatchCase(name="", patches=(patches,), heads=_TOWER_HEADS, width=WIDTH).in_bfloat16()
        arguments = vision.arguments(case, generator)
        work = Work(arguments[0].nbytes, 4 * patches**2 * _TOWER_HEADS * WIDTH)
        yield BenchCase("patch_attention", f"{patches} patches", (arguments,), work, is_cached=True)


def _draft(op: str, name: str, arguments: tuple[object, ...]) -> BenchCase:
    work = Work(sum(tensor.nbytes for tensor in tensors_in(arguments)), 0)
    return BenchCase(op, name, (arguments,), work, is_cached=True)


def gqa_attention(generator: torch.Generator) -> Iterator[BenchCase]:
    """One row over a context: keys and values are read once."""
    for context in CONTEXTS:
        layout = Layout((1,), (context - 1,))
        case = gqa.GroupedCase(
            name="", layout=layout, groups=_GROUPS, readers=_DRAFT_HEADS // _GROUPS, width=_HEAD_WIDTH
        )
        arguments = gqa.attention_arguments(case.in_bfloat16(), generator)
        read = 2 * context * _GROUPS * _HEAD_WIDTH
        work = Work(2 * read, 2 * read * (_DRAFT_HEADS // _GROUPS))
        yield BenchCase("gqa_attention", f"{context} rows", tuple(rotated(arguments)), work)


def gqa_rows(generator: torch.Generator) -> Iterator[BenchCase]:
    """What a context row caches, after its projections."""
    for tokens in TOKENS:
        case = gqa.RowsCase(name="", tokens=tokens, groups=_GROUPS, width=_HEAD_WIDTH).in_bfloat16()
        yield _draft("gqa_rows", f"{tokens} tokens", gqa.rows_arguments(case, generator))


def rotary_turns(generator: torch.Generator) -> Iterator[BenchCase]:
    """Once in a pass."""
    for tokens in TOKENS:
        case = rotary.TurnsCase(name="", layout=Layout((tokens,), (4096,)), pairs=_SHARED // 2)
        yield _draft("rotary_turns", f"{tokens} tokens", rotary.turns_arguments(case, generator))


def rotate(generator: torch.Generator) -> Iterator[BenchCase]:
    """The queries of latent attention."""
    for tokens in TOKENS:
        case = rotary.RotateCase(
            name="", tokens=tokens, heads=_DRAFT_HEADS, width=WIDTH + _SHARED, turned=_SHARED
        ).in_bfloat16()
        yield _draft("rotate", f"{tokens} tokens", rotary.rotate_arguments(case, generator))


BUILDERS: dict[str, Builder] = {
    "kda_decay": kda_decay,
    "kda_recurrent": kda_recurrent,
    "kda_chunk": kda_chunk,
    "kda_mix": kda_mix,
    "short_conv": short_conv,
    "mla_decode": mla_decode,
    "mla_prefill": mla_prefill,
    "indexer_topk": indexer_topk,
    "patch_attention": patch_attention,
    "kda_verify": kda_verify,
    "kda_commit": kda_commit,
    "gqa_attention": gqa_attention,
    "gqa_rows": gqa_rows,
    "rotary_turns": rotary_turns,
    "rotate": rotate,
}
