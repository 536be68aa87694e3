import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#]+)")
# a path of the package in backquotes, such as `engine/core.py`
SOURCE = re.compile(r"`(?:perilune/)?([a-z_]+(?:/[a-z_]+)*\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page):
    bases = (ROOT / "perilune", ROOT)
    named = [name for name in SOURCE.findall(page.read_text()) if "/" in name]
    assert [name for name in named if not any((base / name).exists() for base in bases)] == []


def test_every_page_of_docs_is_in_the_index():
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= linked


def test_the_figures_of_the_demo_are_those_of_its_stored_evaluation():
    evaluation = json.loads((ROOT / "perilune" / "demo" / "evaluation.json").read_text())
    assert evaluation["thinking"] == "off"
    rates = {score["skill"]: score["exact"] / score["asked"] for score in evaluation["scores"]}
    assert set(rates) == {"dictionary", "sums", "recall"}
    for page in (ROOT / "README.md", ROOT / "docs" / "demo.md"):
        text = page.read_text()
        assert [skill for skill, rate in rates.items() if f"{skill} {100 * rate:.1f} %" not in text] == []
