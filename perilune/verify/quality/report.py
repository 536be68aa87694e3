"""What was measured, as a Markdown table and as JSON values."""

from collections.abc import Sequence
from typing import Any

from perilune.verify.quality.run import Result, losses


def render(results: Sequence[Result]) -> str:
    """A table of per cent exact, one line per setting; then why skills were not asked, and what costs too much."""
    skills = list(results[0].scores)
    asked = [f"{skill} ({results[0].scores[skill].asked or '-'})" for skill in skills]
    lines = [f"| setting | {' | '.join(asked)} |", f"|---|{'---|' * len(skills)}"]
    for result in results:
        cells = ["-" if s.refusal is not None else f"{s.percent:.1f}" for s in result.scores.values()]
        lines.append(f"| {result.setting.name} | {' | '.join(cells)} |")
    refusals = {s.refusal: (result, skill) for result in reversed(results) for skill, s in result.scores.items()}
    refusals.pop(None, None)
    notes = [
        f"{skill} cannot be asked ({result.setting.name}): {reason}"
        for reason, (result, skill) in reversed(refusals.items())
    ]
    notes += [f"COSTS TOO MUCH: {loss}" for loss in losses(results)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def as_values(results: Sequence[Result]) -> dict[str, Any]:
    """JSON values: every setting with its server's options and its scores, and what costs too much."""
    return {
        "settings": [
            {
                "name": result.setting.name,
                "options": list(result.setting.arguments),
                "concurrency": result.setting.concurrency,
                "streamed": result.setting.is_streamed,
                "asked_twice": result.setting.is_asked_twice,
                "effort": result.setting.effort,
                "skills": {
                    skill: {"asked": score.asked, "exact": score.exact, "refusal": score.refusal}
                    for skill, score in result.scores.items()
                },
            }
            for result in results
        ],
        "losses": losses(results),
    }
