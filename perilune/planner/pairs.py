"""Published figures of real deployments beside what the planner computes for the same configuration.

A pair is `exact` (within 1 %), `close` (within its own tolerance) or `open`: a disagreement that is shown, not tuned.
A verdict compares yes with no.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from perilune.checkpoint.names import VISION_PARTS, Part
from perilune.config.model import ModelConfig
from perilune.config.presets import preset_config
from perilune.models.accounting import (
    account,
    cache_bytes_per_token,
    conv_state_bytes,
    recurrent_state_bytes,
)
from perilune.parallel.mesh import Placement, Rank
from perilune.planner.cost import token_time
from perilune.planner.hardware import Hardware, load_hardware
from perilune.planner.memory import StageMemory, rank_parts, stage_memories
from perilune.planner.precision import Precision, pieces, workspace_bytes_per_layer
from perilune.planner.search import Question, search
from perilune.planner.units import GiB

MIB, GIB = 2**20, 2**30
EXACT = 0.01
FIRST = Rank(0, 0, 0)
MILLION = 1048576
DT_CLAIM = "K3 on 4 machines of 950DT: one million (the tutorial asks for 8)"


@dataclass(frozen=True)
class Pair:
    number: str
    claim: str
    source: str
    published: float
    computed: float
    unit: str
    kind: Literal["exact", "close", "open"] = "exact"
    tolerance: float = EXACT

    @property
    def error(self) -> float:
        return self.computed / self.published - 1

    @property
    def holds(self) -> bool:
        return self.kind == "open" or abs(self.error) <= self.tolerance


@dataclass(frozen=True)
class Verdict:
    """A published yes or no. `is_open`: the planner disagrees, and the page says so."""

    number: str
    claim: str
    source: str
    published: bool
    computed: bool
    is_open: bool = False

    @property
    def holds(self) -> bool:
        return self.is_open or self.published == self.computed


def released_config(arch: str) -> ModelConfig:
    """The released configuration, "k3" or "k31", without its file."""
    sizes = {"vocab_size": 163840, "intermediate_size": 33792, "num_hidden_layers": 93, "num_experts": 896}
    return preset_config("k3-slice", arch, has_vision=True, sizes=sizes)


def all_pairs() -> list[Pair]:
    k3, k31 = released_config("k3"), released_config("k31")
    found = [*_checkpoints(k3), *_ranks(k3, k31), *_states(k3), *_caches(k3), *_traffic(k3)]
    return sorted(found, key=lambda pair: int(pair.number) if pair.number.isdigit() else 99)


def all_verdicts() -> list[Verdict]:
    """What fits where, as the vendors say."""
    k3, k31, bf16 = released_config("k3"), released_config("k31"), Precision()
    musa, ram = "calculated from Moore Threads' article", "24 x 64 GB of RAM hold it, in decimal GB as published"
    rows: list[tuple[str, str, str, bool, bool]] = [
        ("5", "K3.1 on 8 x MI355X: one million tokens", "AMD", True, _fits(k31, "mi355x", 1, MILLION)),
        *(("20", *row) for row in _ascend(k3)),
        ("24", "8 x MI300X hold the checkpoint", "AMD, calculated", False, _fits(k3, "mi300x", 1, 1)),
        ("24", "8 x MI325X hold the checkpoint", "AMD, calculated", True, _fits(k3, "mi325x", 1, 1)),
        ("24", "MI355X at tp4", "InferenceX", False, _fits_at(k3, "mi355x", Placement(tp=4), bf16)),
        ("MT", "24 x S5000 with the workspace", musa, True, _fits_s5000(k31, 24, "mxfp4_via_fp8")),
        ("MT", "40 x S5000 with a full FP8 copy", musa, False, _fits_s5000(k31, 40, "fp8")),
        ("MT", "48 x S5000 with a full FP8 copy", musa, True, _fits_s5000(k31, 48, "fp8")),
        ("CPU", ram, "notes of this project", False, _fits(k3, "dual-xeon-ddr4", 1, 1)),
    ]
    return [Verdict(*row, is_open=row[1] in (ram, DT_CLAIM)) for row in rows]


def _ascend(k3: ModelConfig) -> Iterator[tuple[str, str, bool, bool]]:
    source = "vLLM Ascend tutorial 0.26"
    for claim, name, num_nodes, context, published in (
        ("K3 on 4 A3 machines: 131,072 tokens", "atlas-800i-a3", 4, 131072, True),
        ("K3 on 4 A3 machines: one million", "atlas-800i-a3", 4, MILLION, False),
        ("K3 on 8 A3 machines: one million", "atlas-800i-a3", 8, MILLION, True),
        (DT_CLAIM, "ascend-950dt", 4, MILLION, False),
    ):
        yield claim, source, published, _fits(k3, name, num_nodes, context)


def _checkpoints(k3: ModelConfig) -> Iterator[Pair]:
    totals, whole = account(k3), Precision(experts="fp8")
    shared, attention = _shared_parameters(k3), _attention_parameters(k3)
    yield Pair("1", "released checkpoint", "InferenceX, MLX", 1.561, totals.total_size / 1e12, "TB")
    yield Pair("1", "all weights in bf16", "AMD", 5.6, 2 * _parameters(k3) / 1e12, "TB", "close")
    redhat = "vLLM recipes#688"
    size = sum(piece.total_bytes for piece in pieces(k3, whole)) / 1e12
    yield Pair("2", "FP8 blocks, experts only", redhat, 2.82, size, "TB", "close", 0.02)
    size = sum(piece.total_bytes for piece in pieces(k3, replace(whole, dense="fp8"))) / 1e12
    yield Pair("2", "FP8 blocks, attention and shared experts too", redhat, 2.82, size, "TB", "close", 0.02)
    experts = totals.parts[Part.EXPERTS].parameters
    yield Pair("3", "experts at 4 bits, before scales", "Fluffy W4A16", 1267.88, experts / 2 / GIB, "GiB")
    yield Pair("3", "shared experts at 8 bits", "Fluffy W4A16", 11.32, shared / GIB, "GiB")
    yield Pair("3", "attention at 4 bits", "Fluffy W4A16", 16.85, attention / 2 / GIB, "GiB")


def _ranks(k3: ModelConfig, k31: ModelConfig) -> Iterator[Pair]:
    mi355x, rtx = load_hardware("mi355x"), load_hardware("rtx-pro-6000")
    atom, tp8, fp8 = mi355x.engines[0], Placement(tp=8), Precision(dense="fp8")
    parts = rank_parts(k31, atom, tp8, fp8, FIRST)
    vision = sum(size for part, size in parts.items() if part in VISION_PARTS)
    yield Pair("4", "ATOM tp8, peak with less peak without vision", "ATOM recipe", 0.83, vision / GIB, "GiB")
    weights = sum(parts.values()) / 1e9
    yield Pair("5", "K3.1 tp8, FP8 dense: weights per GPU", "AMD", 199, weights, "GB", "close")
    # ATOM's peak for K3, and the 7.12 GB of its draft
    peak = 191.81 + parts[Part.INDEXER] / GIB + 7.12e9 / GIB
    yield Pair("5", "the same figure read as GiB: K3 peak, indexer and draft", "AMD", 199, peak, "GiB", "close")
    plain = replace(atom, has_vision=False)
    wide = sum(rank_parts(k3, plain, Placement(dp=16, ep=16), Precision(), FIRST).values())
    yield Pair("7", "EP16, bf16 dense, no vision", "pegainfer", 189.9, wide / GIB, "GiB")
    pruned = replace(k3, moe=replace(k3.moe, num_experts=224))
    wide = sum(rank_parts(pruned, plain, Placement(dp=4, ep=4), Precision(), FIRST).values())
    yield Pair("8", "224 experts, EP4", "pegainfer", 189, wide / GIB, "GiB", "close")
    sharded = sum(rank_parts(k3, rtx.engines[0], Placement(tp=16), Precision(), FIRST).values())
    yield Pair("14", "16 x RTX PRO 6000, all sharded", "local-inference-lab", 90.96, sharded / GIB, "GiB")
    saved = _shared_parameters(k3) * 2 * 7 / 8
    yield Pair("19", "sharding the shared experts at tp8 saves", "vllm#50912", 17, saved / GIB, "GiB", "open")
    loaded = sum(rank_parts(k3, atom, tp8, Precision(), FIRST).values()) + 7.12e9 + 5.5e9
    published = 0.705 * GiB(287.98).num_bytes / 1e9
    claim = "MI350X, 70.5 % after load: bf16 weights, draft and 5 to 6 GB of runtime"
    yield Pair("21", claim, "sglang#39029", published, loaded / 1e9, "GB", "close", 0.02)
    yield Pair("22", "MI355X, what a fraction of 0.95 asks for", "InferenceX", 273.59, 0.95 * 287.98, "GiB")
    quarter = account(k3).total_size / 4e9
    yield Pair("24", "a quarter of the checkpoint", "InferenceX", 390, quarter, "GB", "close")
    workspace = workspace_bytes_per_layer(k31) / 32 / 1e9
    yield Pair("MT", "FP8 workspace per card at EP32", "own calculation", 0.92, workspace, "GB", "close")


def _states(k3: ModelConfig) -> Iterator[Pair]:
    for number, drafts, published in (("6", 2, 54.78), ("6", 7, 57.81)):
        # the convolution keeps its own three taps and one for each draft
        conv = conv_state_bytes(k3) * (3 + drafts) // 3
        size = (recurrent_state_bytes(k3) + conv) / 8 / MIB
        yield Pair(number, f"state entry at tp8 with {drafts} drafts", "ATOM", published, size, "MiB")
    double = 2 * (recurrent_state_bytes(k3) + conv_state_bytes(k3, itemsize=4)) / 1e6
    yield Pair("9", "double-buffered float32 state", "pegainfer", 929, double, "MB")
    layer = (recurrent_state_bytes(k3) + conv_state_bytes(k3)) / len(k3.kda_layers) / 8
    rows = layer / k3.mla.cache_width
    yield Pair("15", "page grain at 32K: state in FP8 rows, up to 64s", "TokenSpeed", 1472, -(-rows // 64) * 64, "rows")
    yield Pair("15", "page grain at 1M: up to 128s", "TokenSpeed", 1536, -(-rows // 128) * 128, "rows")


def _caches(k3: ModelConfig) -> Iterator[Pair]:
    fp8 = cache_bytes_per_token(k3, "fp8")
    yield Pair("11", "latent rows in bf16", "pegainfer", 27.6, cache_bytes_per_token(k3) / 1e3, "KB/token")
    heads = k3.mla.num_heads * (k3.mla.qk_head_dim + k3.mla.v_head_dim) * 2 * len(k3.full_attn_layers)
    yield Pair("11", "expanded keys and values in bf16", "pegainfer", 1.47, heads / 1e6, "MB/token")
    tokens = GiB(42.23).num_bytes / fp8
    yield Pair("12", "B300 tp8 FP8: tokens in 42.23 GiB", "InferenceX", 3249215, tokens, "tokens")
    yield Pair("12", "B300 tp8 FP8: bytes of a token", "InferenceX", 13955, fp8, "B/token")
    yield Pair("13", "one million tokens in FP8", "InferenceX", 15, MILLION * fp8 / 1e9, "GB", "close", 0.05)
    per_token = cache_bytes_per_token(k3, "float32")
    for published, context in ((35.64, 131072), (83.22, MILLION)):
        # the published floor at 4K, and the rows of what is longer
        size = 29.06 + (context - 4096) * per_token / GIB
        yield Pair("16", f"float32 rows, floor at {context:,} tokens", "WASTE", published, size, "GiB")
    expanded = 12 * (k3.mla.cache_width + k3.mla.kv_lora_rank) * len(k3.full_attn_layers) / 1024
    plug_in = "ATOM#1959, KB read as KiB"
    yield Pair("18", "12 heads of expanded rows", plug_in, 309, expanded, "KiB/token", "close", 0.05)
    yield Pair("18", "native rows in bf16", plug_in, 26, cache_bytes_per_token(k3) / 1024, "KiB/token", "close", 0.05)
    gb300 = load_hardware("gb300")
    one, eight = (_stage(k3, gb300, Placement(tp=8, dcp=dcp)).num_tokens(1) for dcp in (1, 8))
    yield Pair(
        "23", "pool of dcp8 over that of tp8 (8 less fixed parts)", "InferenceX", 7.5, eight / one, "x", "close", 0.07
    )


def _traffic(k3: ModelConfig) -> Iterator[Pair]:
    totals, moe = account(k3), k3.moe
    router = moe.num_experts * k3.hidden_size * 2 * (k3.num_hidden_layers - k3.first_k_dense_replace)
    hit = totals.parts[Part.EXPERTS].bytes_active
    dense = totals.decode_weight_bytes - hit - totals.parts[Part.LM_HEAD].bytes - router
    yield Pair("10", "dense bytes of a step, no head, no router", "pegainfer", 100.5, dense / GIB, "GiB")
    cold = totals.parts[Part.EXPERTS].parameters_active * 3 / 8
    yield Pair("17", "experts of a token at 3 bits", "WASTE", 17.0, cold / GIB, "GiB")
    pack = 985.6 * moe.num_experts_per_token / moe.num_experts
    for published, hits in ((22.1, 0.17), (27.6, 0.227)):
        claim = f"SSD reads of a token at {hits:.1%} hits, experts alone"
        yield Pair("27", claim, "lmsys blog 2026-08-29", published, pack * (1 - hits), "GB", "open")
    unread = {Part.EXPERTS, Part.EMBEDDING, *VISION_PARTS}
    eight = sum(p.total_bytes for p in pieces(k3, Precision(dense="int8")) if p.part not in unread)
    yield Pair("29", "non-expert bytes of a token, 8 bits", "MLX", 61, eight / 1e9, "GB", "close", 0.02)
    yield Pair("29", "all bytes of a token", "MLX", 87, (eight + hit) / 1e9, "GB", "close", 0.02)
    b300, gb300 = load_hardware("b300"), load_hardware("gb300")
    time = _ideal_ms(k3, b300, Placement(tp=8)) / (gb300.efficiency.amount if gb300.efficiency else 1)
    claim = "B300 tp8, one stream, with the efficiency of GB300"
    yield Pair("25", claim, "sglang#37878", 8.51, time, "ms", "open")
    ratio = _ideal_ms(k3, gb300, Placement(tp=8)) / _ideal_ms(k3, gb300, Placement(tp=16))
    claim = "GB300, tp16 over tp8, by bytes alone (latency is not modelled)"
    yield Pair("25", claim, "vLLM blog 2026-07-27", 118 / 111, ratio, "x", "open")


def _stage(config: ModelConfig, hardware: Hardware, placement: Placement) -> StageMemory:
    engine = hardware.engines[0]
    return stage_memories(config, hardware, engine, placement, engine.precisions[0])[0]


def _ideal_ms(config: ModelConfig, hardware: Hardware, placement: Placement) -> float:
    stages = (_stage(config, hardware, placement),)
    precision = hardware.engines[0].precisions[0]
    time = token_time(config, hardware, placement, precision, stages, context=1, concurrency=1)
    assert time is not None
    return time.ideal_s * 1e3


def _fits(config: ModelConfig, name: str, num_nodes: int, context: int) -> bool:
    """In a published layout, or in any where none is published."""
    result = search(config, load_hardware(name), Question(num_nodes, context))
    has_layout = any(config.arch in engine.published for engine in result.hardware.engines)
    return any(plan.is_published or not has_layout for plan in result.plans)


def _fits_at(config: ModelConfig, name: str, placement: Placement, precision: Precision) -> bool:
    """By bytes alone: 40 cards, for one, divide no head count."""
    hardware = load_hardware(name)
    stages = stage_memories(config, hardware, hardware.engines[0], placement, precision)
    return all(stage.free_bytes > 0 for stage in stages)


def _fits_s5000(config: ModelConfig, num_cards: int, experts: str) -> bool:
    return _fits_at(config, "mtt-s5000", Placement(tp=num_cards), Precision(experts, "fp8"))


def _parameters(config: ModelConfig) -> int:
    totals = account(config)
    return totals.parameters_total + totals.parameters_vision


def _shared_parameters(config: ModelConfig) -> int:
    layers = config.num_hidden_layers - config.first_k_dense_replace
    return 3 * config.moe.shared_intermediate_size * config.hidden_size * layers


def _attention_parameters(config: ModelConfig) -> int:
    parts = account(config).parts
    return parts[Part.KDA].parameters + parts[Part.MLA].parameters
