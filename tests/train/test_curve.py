from xml.etree import ElementTree

import pytest

from train.curve import LEFT, PANELS, RIGHT, draw, running_mean

ENTRIES = [
    {"tokens": 100, "loss": 4.0},
    {"tokens": 200, "loss": 1.0, "exact": {"sums": 0.0, "tools": 0.5}},
    {"tokens": 400, "loss": 2.0, "exact": {"sums": 1.0, "tools": 0.5}},
]


def test_the_picture_has_both_losses_and_a_line_for_every_skill():
    root = ElementTree.fromstring(draw(ENTRIES, "text & skills"))
    texts = [element.text for element in root if element.tag.endswith("text")]
    lines = [element.get("points") for element in root if element.tag.endswith("polyline")]
    assert texts[0] == "text & skills"
    assert {"sums 100 %", "tools 50 %"} <= set(texts)
    losses, _, sums, tools = (line for line in lines if line.count(" ") != 2 or line.startswith(f"{LEFT + 150}"))
    (top, bottom), (low_top, low_bottom) = PANELS
    assert losses.split()[0] == f"{LEFT + 0.25 * (RIGHT - LEFT):.1f},{top:.1f}"
    assert sums.split() == [
        f"{LEFT + 0.5 * (RIGHT - LEFT):.1f},{low_bottom:.1f}",
        f"{RIGHT:.1f},{low_top:.1f}",
    ]
    assert bottom < low_top
    assert len(tools.split()) == 2


def test_the_running_mean_starts_at_the_first_value_and_leans_to_the_last_ones():
    found = [y for _, y in running_mean([(0, 4.0), (1, 0.0), (2, 0.0)])]
    assert found[0] == 4.0
    assert found[1] == pytest.approx(4 * 0.9 / 1.9)
    assert found[2] < found[1]
