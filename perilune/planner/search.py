"""Every placement and precision of a machine: those that fit, best first, and the others with their reasons."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from perilune.config.model import ModelConfig
from perilune.errors import ConfigError
from perilune.models.accounting import account, expert_floor_bytes, step_workspace_bytes
from perilune.parallel.mesh import Placement
from perilune.planner.cost import TokenTime, token_time
from perilune.planner.hardware import Engine, Hardware
from perilune.planner.memory import StageMemory, stage_memories
from perilune.planner.precision import Precision
from perilune.planner.units import GB

MAX_NODES, MAX_CONCURRENCY = 1024, 65536
PIPELINES = (1, 2, 4, 8, 16)
# what `perilune serve` computes in one step by default
STEP_TOKENS = 512


@dataclass(frozen=True)
class Question:
    """What is asked: `concurrency` requests of `context` tokens each, on `num_nodes` machines."""

    num_nodes: int = 1
    context: int = 131072
    concurrency: int = 1


@dataclass(frozen=True)
class Plan:
    """One way to run the model that fits, with its capacity."""

    engine: Engine
    placement: Placement
    precision: Precision
    stages: tuple[StageMemory, ...]
    is_published: bool
    time: TokenTime | None
    num_tokens: int  # of cache beside the asked states, over all data-parallel groups
    longest_context: int
    num_requests: int  # that fit at the asked context
    binding: str

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.peak_bytes)


@dataclass(frozen=True)
class RefusedPlan:
    """`constraint` names what was not met: vendor, layout, published limit, weights, runtime, states or cache."""

    label: str
    constraint: str
    reason: str


@dataclass(frozen=True)
class Result:
    hardware: Hardware
    question: Question
    plans: tuple[Plan, ...]
    refused: tuple[RefusedPlan, ...]


def search(config: ModelConfig, hardware: Hardware, question: Question) -> Result:
    """Plans of one machine type for one question; raises ConfigError for a question without sense."""
    _check(config, hardware, question)
    num_devices = int(hardware.devices_per_node.amount) * question.num_nodes
    plans: list[Plan] = []
    refused = [
        RefusedPlan(refusal.what, "vendor", f"{refusal.reason} ({refusal.source})")
        for refusal in hardware.refusals
        if refusal.applies(config.arch, num_devices)
    ]
    if any(refusal.is_total and refusal.applies(config.arch, num_devices) for refusal in hardware.refusals):
        return Result(hardware, question, (), tuple(refused))
    for engine in hardware.engines:
        precisions = dict.fromkeys(_canonical(precision, config) for precision in engine.precisions)
        for placement in placements(hardware, question.num_nodes):
            reason = placement.refusal(config) or _engine_refusal(engine, placement)
            if reason is not None:
                refused.append(RefusedPlan(f"{engine.name}, {placement.label}", "layout", reason))
                continue
            for precision in precisions:
                found = assess(config, hardware, engine, placement, precision, question)
                if isinstance(found, Plan):
                    plans.append(found)
                else:
                    refused.append(found)
    return Result(hardware, question, tuple(sorted(plans, key=_rank)), tuple(refused))


def placements(hardware: Hardware, num_nodes: int) -> Iterator[Placement]:
    """All placements of the machines; on a single one also of fewer of its devices."""
    devices = int(hardware.devices_per_node.amount)
    worlds = _divisors(devices) if num_nodes == 1 else [devices * num_nodes]
    for world in reversed(worlds):
        for pp in (pp for pp in PIPELINES if world % pp == 0):
            for tp in _divisors(world // pp):
                dp = world // pp // tp
                for ep in sorted({1, tp} if dp == 1 else {dp * tp}):
                    for dcp in sorted({dcp for dcp in (1, 8, tp) if tp % dcp == 0}):
                        yield Placement(tp=tp, pp=pp, dp=dp, ep=ep, dcp=dcp)


def assess(
    config: ModelConfig,
    hardware: Hardware,
    engine: Engine,
    placement: Placement,
    precision: Precision,
    question: Question,
) -> Plan | RefusedPlan:
    """Capacity and time of one plan, or the first thing that it lacks."""
    stages = stage_memories(config, hardware, engine, placement, precision)
    requests = -(-question.concurrency // placement.dp)
    for stage in stages:
        lack = _lack(stage, question, requests)
        if lack is not None:
            where = f" on the fullest rank of stage {stage.stage + 1}" if placement.pp > 1 else " on the fullest rank"
            label = f"{engine.name}, {placement.label}, {precision.label}"
            remedy = _streamed(config, stage, question, requests) if engine.is_perilune else ""
            return RefusedPlan(label, lack[0], lack[1] + where + remedy)
    limit = config.max_position_embeddings
    longest = min(limit, *(stage.num_tokens(engine.slots_per_request) for stage in stages))
    tightest = min(stages, key=lambda stage: stage.num_requests(question.context))
    rows = tightest.rows_bytes(question.context)
    return Plan(
        engine=engine,
        placement=placement,
        precision=precision,
        stages=stages,
        is_published=placement.label in engine.published.get(config.arch, ()),
        time=token_time(config, hardware, placement, precision, stages, question.context, question.concurrency),
        num_tokens=placement.dp * min(stage.num_tokens(requests) for stage in stages),
        longest_context=longest,
        num_requests=placement.dp * tightest.num_requests(question.context),
        binding="cache rows" if rows >= tightest.state_bytes else "state slots",
    )


def _streamed(config: ModelConfig, stage: StageMemory, question: Question, requests: int) -> str:
    """What experts that stay on disk would need, where that is there."""
    parts = (
        account(config, is_quantised=True).resident_bytes,
        expert_floor_bytes(config),
        step_workspace_bytes(config, STEP_TOKENS, requests),
        requests * stage.request_bytes(question.context),
    )
    if sum(parts) > stage.budget_bytes:
        return ""
    return (
        f"; with experts read from disk and dense weights in int8, perilune serve needs {GB.of(sum(parts))} at least, "
        "and keeps as many experts as the rest holds"
    )


def _lack(stage: StageMemory, question: Question, requests: int) -> tuple[str, str] | None:
    """The first constraint that a stage breaks, and the sentence that says so."""
    budget = GB.of(stage.budget_bytes)
    if stage.resident_bytes > stage.memory_bytes:
        return "weights", f"weights take {GB.of(stage.resident_bytes)} of {GB.of(stage.memory_bytes)}"
    if stage.free_bytes < 0:
        need = GB.of(stage.peak_bytes)
        return "runtime", f"weights, workspace and runtime take {need}; the engine may use {budget}"
    states = requests * stage.state_bytes
    if states > stage.free_bytes:
        return "states", f"{requests} states take {GB.of(states)} of {GB.of(stage.free_bytes)} free"
    need_bytes = requests * stage.request_bytes(question.context)
    if need_bytes > stage.free_bytes:
        asked = f"{requests} request(s) of {question.context:,} tokens"
        return "cache", f"{asked} take {GB.of(need_bytes)} of {GB.of(stage.free_bytes)} free"
    return None


def _engine_refusal(engine: Engine, placement: Placement) -> str | None:
    if engine.is_perilune and placement.num_ranks > 1:
        return "perilune runs as one process today"
    if engine.max_tp is not None and placement.tp > engine.max_tp.amount:
        return f"tp above {engine.max_tp.text} is refused by {engine.name} ({engine.max_tp.source})"
    if placement.dcp not in engine.dcp:
        allowed = ", ".join(map(str, engine.dcp))
        return f"no published layout of {engine.name} here has dcp {placement.dcp}; known: {allowed}"
    return None


def _canonical(precision: Precision, config: ModelConfig) -> Precision:
    """Without an indexer the format of its keys says nothing."""
    plain = "float32" if precision.latent == "float32" else "bfloat16"
    return precision if config.indexer is not None else replace(precision, index=plain)


def _rank(plan: Plan) -> tuple[bool, float, int, int]:
    """Published layouts first, then the shorter ideal time, then room, then fewer devices."""
    time = plan.time.ideal_s if plan.time is not None else 0.0
    return not plan.is_published, time, -plan.num_tokens, plan.placement.num_ranks


def _check(config: ModelConfig, hardware: Hardware, question: Question) -> None:
    most_nodes = min(MAX_NODES, int(hardware.max_nodes.amount))
    if not 1 <= question.num_nodes <= most_nodes:
        raise ConfigError(f"--nodes is {question.num_nodes}; allowed for {hardware.id}: 1 to {most_nodes}")
    if not 1 <= question.context <= config.max_position_embeddings:
        raise ConfigError(
            f"--context is {question.context}; allowed: 1 to {config.max_position_embeddings}, the model's own context"
        )
    if not 1 <= question.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency is {question.concurrency}; allowed: 1 to {MAX_CONCURRENCY}")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
