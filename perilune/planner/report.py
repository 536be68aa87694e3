"""A search result as JSON values and as a table for people."""

from collections.abc import Iterable
from typing import Any

from perilune.config.model import ModelConfig
from perilune.planner.cost import handoff
from perilune.planner.hardware import Figure, Hardware
from perilune.planner.memory import MAX_TOKENS
from perilune.planner.search import Plan, RefusedPlan, Result
from perilune.planner.settings import settings_line
from perilune.planner.units import GB, GiB

NUM_SHOWN = 5
NUM_REFUSED_SHOWN = 8


def to_json(config: ModelConfig, result: Result, checkpoint: str) -> dict[str, Any]:
    """Everything the search found; sizes in bytes, times in seconds."""
    return {
        "arch": config.arch,
        "hardware": _hardware_json(result.hardware),
        "question": {
            "nodes": result.question.num_nodes,
            "context": result.question.context,
            "concurrency": result.question.concurrency,
        },
        "plans": [_plan_json(config, plan, result, checkpoint) for plan in result.plans],
        "refused": [
            {"plan": refused.label, "constraint": refused.constraint, "reason": refused.reason}
            for refused in result.refused
        ],
    }


def render(config: ModelConfig, result: Result, checkpoint: str) -> str:
    """The best plans, how the first one fills its memory, and why others were refused."""
    hardware, question = result.hardware, result.question
    model = "Kimi K3.1 Pro" if config.arch == "k31" else "Kimi K3"
    size = f"{hardware.memory.text} each ({GB.of(hardware.memory.amount)}; {hardware.memory.grade})"
    lines = [
        f"{model} on {question.num_nodes} x {hardware.name}, {size}",
        f"asked: {question.concurrency} request(s) of {question.context:,} tokens",
        *(f"note: {note}" for note in hardware.notes),
        "",
    ]
    if result.plans:
        if not any(plan.is_published for plan in result.plans):
            lines += ["No published layout fits or is known here; what follows is arithmetic only.", ""]
        lines += [*_table(result.plans[:NUM_SHOWN]), ""]
        lines += _best(config, result, checkpoint)
    else:
        lines += ["No plan fits.", ""]
    return "\n".join([*lines, *_refusals(result.refused)])


def _table(plans: Iterable[Plan]) -> list[str]:
    head = f"{'#':<3}{'placement':<22}{'dense':<9}{'rows/index keys':<19}{'GB/rank':>9}{'peak':>9}{'longest':>11}"
    lines = [f"{head}{'requests':>10}{'ms ideal':>10}{'expected':>10}  status"]
    for number, plan in enumerate(plans, 1):
        fullest, time = plan.fullest, plan.time
        cache = f"{plan.precision.latent}/{plan.precision.index}"
        ideal = f"{time.ideal_s * 1e3:.2f}" if time else "unknown"
        expected = f"{time.expected_s * 1e3:.2f}" if time and time.expected_s else "unknown"
        row = f"{number:<3}{plan.placement.label:<22}{plan.precision.dense:<9}{cache:<19}"
        row += f"{fullest.resident_bytes / 1e9:>9.1f}{fullest.peak_bytes / 1e9:>9.1f}{plan.longest_context:>11,}"
        row += f"{plan.num_requests:>10,}{ideal:>10}{expected:>10}  "
        lines.append(row + (f"published, {plan.engine.name}" if plan.is_published else "arithmetic only"))
    return lines


def _best(config: ModelConfig, result: Result, checkpoint: str) -> list[str]:
    plan, question = result.plans[0], result.question
    stage, move = plan.fullest, handoff(config, plan.precision, question.context)
    parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in stage.parts.items() if size)
    times = ", ".join(f"{seconds * 1e3:.0f} ms over {name}" for name, seconds in move.seconds.items())
    workspace, reserve = GB.of(stage.workspace_bytes), _given(plan.engine.reserve)
    room, state = _tokens(plan.num_tokens), f"{stage.state_bytes / 1e6:.1f} MB a rank"
    lines = [
        f"plan 1: {plan.precision.label}; against the release: {plan.precision.loss}",
        f"  fullest rank, GB: {parts}",
        f"  resident {_both(stage.resident_bytes)}; conversion workspace {workspace}",
        f"  runtime: {reserve}; usable share: {_given(plan.engine.usable)}",
        f"  room: {room} tokens of cache beside {question.concurrency} state(s) of {state}; binding: {plan.binding}",
        f"  prefill to decode: {GB.of(move.rows_bytes)} of rows and {GB.of(move.state_bytes)} of state, {times}",
    ]
    if plan.time is not None:
        lines.append(
            f"  time: {GB.of(plan.time.bytes_per_rank)} a rank and token, bound by {plan.time.bound} at "
            f"{_given(result.hardware.bandwidth)}; efficiency {_given(result.hardware.efficiency)}"
        )
    lines += ["", "settings:"]
    lines += [
        f"  {number}. {settings_line(shown, question, checkpoint)}"
        for number, shown in enumerate(result.plans[:NUM_SHOWN], 1)
    ]
    return [*lines, ""]


def _refusals(refused: tuple[RefusedPlan, ...]) -> list[str]:
    if not refused:
        return ["refused: nothing"]
    # the vendors' word first, then what lacked memory, then what does not divide
    ordered = sorted(refused, key=lambda item: (item.constraint != "vendor", item.constraint == "layout"))
    lines = [f"refused: {len(refused)}"]
    lines += [f"  {item.label}: {item.reason} [{item.constraint}]" for item in ordered[:NUM_REFUSED_SHOWN]]
    rest = len(refused) - NUM_REFUSED_SHOWN
    return [*lines, f"  and {rest} more; --json lists all"] if rest > 0 else lines


def _hardware_json(hardware: Hardware) -> dict[str, Any]:
    names = ("devices_per_node", "max_nodes", "memory", "bandwidth", "compute", "efficiency")
    figures = {name: _figure_json(getattr(hardware, name)) for name in names}
    return {"id": hardware.id, "name": hardware.name, **figures, "notes": list(hardware.notes)}


def _figure_json(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"amount": figure.amount, "text": figure.text, "source": figure.source, "grade": figure.grade}


def _plan_json(config: ModelConfig, plan: Plan, result: Result, checkpoint: str) -> dict[str, Any]:
    placement, time, move = plan.placement, plan.time, handoff(config, plan.precision, result.question.context)
    return {
        "engine": plan.engine.name,
        "placement": {name: getattr(placement, name) for name in ("tp", "pp", "dp", "ep", "dcp")},
        "precision": {name: getattr(plan.precision, name) for name in ("experts", "dense", "latent", "index")},
        "loss": plan.precision.loss,
        "is_published": plan.is_published,
        "stages": [
            {
                "parts_bytes": {str(part): size for part, size in stage.parts.items()},
                "resident_bytes": stage.resident_bytes,
                "workspace_bytes": stage.workspace_bytes,
                "reserve_bytes": stage.reserve_bytes,
                "peak_bytes": stage.peak_bytes,
                "budget_bytes": stage.budget_bytes,
                "free_bytes": stage.free_bytes,
                "state_bytes_per_request": stage.state_bytes,
            }
            for stage in plan.stages
        ],
        "cache_tokens": plan.num_tokens if plan.num_tokens < MAX_TOKENS else None,
        "longest_context": plan.longest_context,
        "requests_at_context": plan.num_requests,
        "binding": plan.binding,
        "time_per_token": None
        if time is None
        else {
            "ideal_s": time.ideal_s,
            "expected_s": time.expected_s,
            "bound": time.bound,
            "bytes_per_rank": time.bytes_per_rank,
        },
        "handoff": {"rows_bytes": move.rows_bytes, "state_bytes": move.state_bytes, "seconds": move.seconds},
        "settings": settings_line(plan, result.question, checkpoint),
    }


def _both(num_bytes: int) -> str:
    return f"{GB.of(num_bytes)} ({GiB.of(num_bytes)})"


def _given(figure: Figure | None) -> str:
    return "not published" if figure is None else f"{figure.text} ({figure.grade}: {figure.source})"


def _tokens(num_tokens: int) -> str:
    return "any number of" if num_tokens >= MAX_TOKENS else f"{num_tokens:,}"
