from xml.etree import ElementTree

import pytest

from perilune.planner.hardware import load_hardware, probe
from perilune.planner.plot import plot, segments
from perilune.planner.search import Question, search


@pytest.mark.parametrize(("name", "nodes"), [("mi355x", 1), ("mtt-s5000", 4), ("dual-epyc-turin", 1)])
def test_the_bar_is_the_memory_and_the_file_is_xml(k31, name, nodes):
    result = search(k31, load_hardware(name), Question(nodes))
    plan = result.plans[0]
    assert sum(size for _, size in segments(plan)) == plan.fullest.memory_bytes
    root = ElementTree.fromstring(plot(k31, result, plan))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("routed_experts" in text for text in texts)
    assert "1024K" in texts


def test_a_small_model_on_this_machine_can_be_drawn(small):
    result = search(small, probe(memory_bytes=2**30, num_cpus=1), Question(1, 100))
    ElementTree.fromstring(plot(small, result, result.plans[0]))
