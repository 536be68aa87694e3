"""The curves of a training as an SVG: `python -m train.curve runs/demo/text.jsonl --out curve.svg`.

Above, the loss of every step and its running mean; below, exact answers to held-out questions by skill.
"""

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 820, 60, 660
PANELS = ((40, 220), (270, 450))
HEIGHT = 480
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
MEMORY = 0.9  # of the running mean, per step

Point = tuple[float, float]


def draw(entries: Sequence[dict[str, Any]], title: str) -> str:
    """The text of an SVG file; entries are lines of a log, oldest first."""
    last = max(float(entry["tokens"]) for entry in entries)
    losses = [(entry["tokens"] / last, float(entry["loss"])) for entry in entries]
    highest = max(loss for _, loss in losses)
    probes = [entry for entry in entries if "exact" in entry]
    skills = list(dict.fromkeys(skill for entry in probes for skill in entry["exact"]))
    body = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', _text(LEFT, 22, title)]
    body += _axes(PANELS[0], f"{highest:.2f}", f"loss, {last / 1e6:.2f} million tokens")
    body.append(_line(_placed(losses, PANELS[0], highest), "#cccccc"))
    body.append(_line(_placed(running_mean(losses), PANELS[0], highest), "#333333"))
    body += _axes(PANELS[1], "100 %", "exact answers to held-out questions")
    for number, skill in enumerate(skills):
        color = COLORS[number % len(COLORS)]
        points = [(entry["tokens"] / last, entry["exact"][skill]) for entry in probes if skill in entry["exact"]]
        body.append(_line(_placed(points, PANELS[1], 1.0), color))
        y = PANELS[1][0] + 10 + 18 * number
        body.append(f'<rect x="{RIGHT + 12}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        body.append(_text(RIGHT + 28, y, f"{skill} {100 * points[-1][1]:.0f} %"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, *body, "</svg>", ""])


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The means of what came so far, which forgets a tenth with every step."""
    found, total, weight = [], 0.0, 0.0
    for x, y in points:
        total, weight = MEMORY * total + y, MEMORY * weight + 1
        found.append((x, total / weight))
    return found


def _placed(points: Sequence[Point], panel: tuple[int, int], highest: float) -> list[Point]:
    top, bottom = panel
    return [(LEFT + (RIGHT - LEFT) * x, bottom - (bottom - top) * y / highest) for x, y in points]


def _axes(panel: tuple[int, int], highest: str, label: str) -> list[str]:
    top, bottom = panel
    corner = f"{LEFT},{top} {LEFT},{bottom} {RIGHT},{bottom}"
    axes = f'<polyline points="{corner}" fill="none" stroke="#888888"/>'
    return [axes, _text(8, top + 10, highest), _text(8, bottom, "0"), _text(LEFT, bottom + 18, label)]


def _line(points: Sequence[Point], color: str) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="12">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="a stage's .jsonl, or the log.jsonl of train.run")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lines = arguments.log.read_text(encoding="utf-8").splitlines()
    arguments.out.write_text(draw([json.loads(line) for line in lines], arguments.log.stem), encoding="utf-8")


if __name__ == "__main__":
    main()
