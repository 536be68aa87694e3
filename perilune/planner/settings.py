"""The line that would realise a plan: `perilune serve` where perilune can do it, else the vendor engine's settings.

Vendor settings are what their documents name, in words; they are not command lines.
"""

from perilune.config.engine import EngineConfig
from perilune.planner.search import Plan, Question


def settings_line(plan: Plan, question: Question, checkpoint: str = "CHECKPOINT") -> str:
    """One line, with the sizes that the question asks for."""
    if plan.engine.is_perilune:
        return " ".join(["perilune", "serve", checkpoint, *serve_options(plan, question)])
    sizes = {name: getattr(plan.placement, name) for name in ("tp", "pp", "dp", "ep", "dcp")}
    line = plan.engine.settings.format(**sizes, context=question.context, concurrency=question.concurrency)
    chosen = (plan.precision.experts, plan.precision.dense)
    further = [text for value, text in plan.engine.settings_for.items() if value in chosen]
    origin = plan.engine.source if plan.is_published else f"layout not published; settings as in {plan.engine.source}"
    return f"{plan.engine.name}: {'; '.join([line, *further])} [{origin}]"


def serve_options(plan: Plan, question: Question) -> list[str]:
    """Options of `perilune serve` with which its own start-up arithmetic gives every request its place."""
    defaults = EngineConfig()
    (stage,) = plan.stages
    blocks = -(-question.context // defaults.block_size)
    per_request = stage.state_bytes + stage.rows_bytes(blocks * defaults.block_size)
    options = ["--dtype", "float32" if plan.precision.dense == "float32" else "bfloat16"]
    options += ["--max-model-len", str(question.context), "--max-num-seqs", str(question.concurrency)]
    # states kept of earlier requests would take their room from it
    options += ["--cache-memory", str(question.concurrency * per_request), "--state-cache-memory", "0"]
    if question.concurrency > defaults.max_num_batched_tokens:
        options += ["--max-num-batched-tokens", str(question.concurrency)]
    return options
