import json

from perilune.verify.quality.report import as_values, render
from perilune.verify.quality.run import Result, Score, losses
from perilune.verify.quality.settings import BASELINE, Setting


def results(*exact: int, effort: str = "none") -> list[Result]:
    blind = Score(0, 0, "no eyes")
    base = Result(Setting(BASELINE), {"sums": Score(100, 98), "pictures": blind})
    others = [Result(Setting(f"s{n}", effort=effort), {"sums": Score(100, n), "pictures": blind}) for n in exact]
    return [base, *others]


def test_one_question_may_tip_and_two_of_a_hundred_may_not():
    assert losses(results(98, 97)) == []
    assert losses(results(96)) == ["s96: sums loses 2.0 points (2 of 100)"]


def test_thinking_is_not_held_against_answers_without():
    assert losses(results(50, effort="low")) == []


def test_the_table_has_a_line_for_each_setting_and_says_why_a_skill_was_not_asked():
    lines = render(results(96)).splitlines()
    assert lines[0] == "| setting | sums (100) | pictures (-) |"
    assert lines[2:4] == [f"| {BASELINE} | 98.0 | - |", "| s96 | 96.0 | - |"]
    assert lines[5:] == [
        f"pictures cannot be asked ({BASELINE}): no eyes",
        "COSTS TOO MUCH: s96: sums loses 2.0 points (2 of 100)",
    ]


def test_a_refusal_in_one_setting_alone_is_shown_with_its_reason():
    base, other = results(98)
    lines = render([base, Result(other.setting, {"sums": Score(0, 0, "too long"), "pictures": Score(0, 0, "no eyes")})])
    assert "sums cannot be asked (s98): too long" in lines.splitlines()


def test_the_values_are_json_and_hold_counts_and_options():
    values = json.loads(json.dumps(as_values(results(96))))
    assert values["losses"] == losses(results(96))
    second = values["settings"][1]
    assert second["skills"]["sums"] == {"asked": 100, "exact": 96, "refusal": None}
    assert "--no-prefix-cache" in second["options"]
