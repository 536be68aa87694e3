import json

from perilune.planner.hardware import load_hardware, probe
from perilune.planner.report import render, to_json
from perilune.planner.search import Question, search


def test_json_adds_up(k31):
    result = search(k31, load_hardware("mi355x"), Question(1, 1048576))
    report = json.loads(json.dumps(to_json(k31, result, "CHECKPOINT")))
    assert report["question"] == {"nodes": 1, "context": 1048576, "concurrency": 1}
    assert report["hardware"]["memory"]["source"]
    assert len(report["plans"]) == len(result.plans)
    assert len(report["refused"]) == len(result.refused)
    for plan in report["plans"]:
        for stage in plan["stages"]:
            assert sum(stage["parts_bytes"].values()) == stage["resident_bytes"]
            extra = stage["workspace_bytes"] + stage["reserve_bytes"]
            assert stage["peak_bytes"] == stage["resident_bytes"] + extra
            assert stage["free_bytes"] == stage["budget_bytes"] - stage["peak_bytes"]


def test_the_table_names_plans_memory_time_settings_and_refusals(k31):
    text = render(k31, search(k31, load_hardware("mi355x"), Question()), "CHECKPOINT")
    for expected in ("tp8 dcp8", "published, ATOM", "199.8", "routed_experts 180.81", "binding: ", "refused: "):
        assert expected in text
    assert "sglang#39029" in text
    assert "ms over 4 x 200G" in text
    assert "Kimi K3.1 Pro on 1 x AMD Instinct MI355X" in text


def test_nothing_that_fits_is_said_plainly(k3):
    text = render(k3, search(k3, probe(memory_bytes=2**30, num_cpus=1), Question()), "CHECKPOINT")
    assert "No plan fits." in text
    assert "weights take 1,559.97 GB of 1.07 GB" in text
    assert "Not measured" in text


def test_plans_without_a_published_layout_say_so(k3):
    text = render(k3, search(k3, load_hardware("mi325x"), Question()), "CHECKPOINT")
    assert "arithmetic only" in text
    assert "unknown" in text
