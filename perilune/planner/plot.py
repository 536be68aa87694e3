"""One plan as an SVG: memory of the fullest rank by part, and how many requests fit at each context."""

from html import escape

from perilune.config.model import ModelConfig
from perilune.planner.search import Plan, Result

WIDTH, HEIGHT = 860, 420
TOP, BOTTOM, LEFT = 70, 360, 60
BAR_WIDTH, CURVE_LEFT, CURVE_RIGHT = 110, 470, 830
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7")
FREE_COLOR, UNUSABLE_COLOR = "#e8e8e8", "#bdbdbd"


def plot(config: ModelConfig, result: Result, plan: Plan) -> str:
    """The text of an SVG file."""
    title = f"{result.question.num_nodes} x {result.hardware.name}: {plan.engine.name}, {plan.placement.label}"
    body = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(20, 26, title, size=15),
        *_bar(plan),
        *_curve(plan, config.max_position_embeddings),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, *body, "</svg>", ""])


def segments(plan: Plan) -> list[tuple[str, int]]:
    """What the memory of the fullest rank holds, in bytes that sum to it."""
    stage = plan.fullest
    found = [(str(part), size) for part, size in stage.parts.items() if size]
    found += [("conversion workspace", stage.workspace_bytes), ("runtime", stage.reserve_bytes)]
    found += [("states and cache rows", stage.free_bytes)]
    found += [("not for the engine", stage.memory_bytes - stage.budget_bytes)]
    return [(name, size) for name, size in found if size]


def _bar(plan: Plan) -> list[str]:
    total, y = plan.fullest.memory_bytes, float(BOTTOM)
    lines = [_text(LEFT, TOP - 18, f"fullest rank, {total / 1e9:.0f} GB")]
    for number, (name, size) in enumerate(segments(plan)):
        height = (BOTTOM - TOP) * size / total
        y -= height
        color = COLORS[number % len(COLORS)]
        color = {"states and cache rows": FREE_COLOR, "not for the engine": UNUSABLE_COLOR}.get(name, color)
        lines.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{BAR_WIDTH}" height="{height:.1f}" fill="{color}"/>')
        legend_y = TOP + 22 * number
        lines.append(f'<rect x="{LEFT + 140}" y="{legend_y}" width="12" height="12" fill="{color}"/>')
        lines.append(_text(LEFT + 158, legend_y + 11, f"{name} {size / 1e9:.2f} GB"))
    return lines


def _curve(plan: Plan, longest: int) -> list[str]:
    contexts = [longest >> shift for shift in range(8, -1, -1) if longest >> shift]
    counts = [plan.placement.dp * min(stage.num_requests(length) for stage in plan.stages) for length in contexts]
    most = max(1, *counts)
    step = (CURVE_RIGHT - CURVE_LEFT) / max(1, len(contexts) - 1)
    points = [(CURVE_LEFT + step * i, BOTTOM - (BOTTOM - TOP) * count / most) for i, count in enumerate(counts)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    lines = [
        _text(CURVE_LEFT, TOP - 18, "requests that fit, by context in tokens"),
        f'<path d="M{CURVE_LEFT} {TOP} V{BOTTOM} H{CURVE_RIGHT}" fill="none" stroke="#888"/>',
        f'<polyline points="{line}" fill="none" stroke="{COLORS[0]}" stroke-width="2"/>',
    ]
    for (x, y), length, count in zip(points, contexts, counts, strict=True):
        lines.append(_text(x - 14, BOTTOM + 18, _short(length), size=10))
        lines.append(_text(x - 8, y - 6, f"{count:,}", size=10))
    return lines


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'


def _short(num_tokens: int) -> str:
    return f"{num_tokens // 1024}K" if num_tokens >= 1024 else str(num_tokens)
