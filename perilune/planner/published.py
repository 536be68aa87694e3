"""Prints the table of published and computed figures that docs/planner.md carries.

python -m perilune.planner.published
"""

from perilune.planner.pairs import Pair, Verdict, all_pairs, all_verdicts


def table() -> str:
    """The Markdown of both tables."""
    lines = [
        "| pair | figure | source | published | computed | error | kept within |",
        "|---|---|---|---|---|---|---|",
        *(_pair_row(pair) for pair in all_pairs()),
        "",
        "| pair | statement | source | published | computed | |",
        "|---|---|---|---|---|---|",
        *(_verdict_row(verdict) for verdict in all_verdicts()),
    ]
    return "\n".join(lines)


def _pair_row(pair: Pair) -> str:
    kept = "open disagreement" if pair.kind == "open" else f"{pair.tolerance:.0%}"
    published, computed = _number(pair.published), _number(pair.computed)
    return (
        f"| {pair.number} | {pair.claim} | {pair.source} | {published} {pair.unit} | {computed} {pair.unit} "
        f"| {pair.error:+.2%} | {kept} |"
    )


def _verdict_row(verdict: Verdict) -> str:
    words = ("no", "yes")
    state = "agrees" if verdict.published == verdict.computed else "open disagreement"
    return (
        f"| {verdict.number} | {verdict.claim} | {verdict.source} | {words[verdict.published]} "
        f"| {words[verdict.computed]} | {state} |"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    print(table())
