from pathlib import Path

from perilune.planner.published import table

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_page_carries_the_table_that_the_command_prints():
    assert table() in PAGE.read_text(), "run python -m perilune.planner.published and paste it into docs/planner.md"
