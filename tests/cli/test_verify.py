import json

import pytest
from typer.testing import CliRunner

from perilune.cli import verify
from perilune.verify.ops import OpsReport, Ran, Skipped

GOOD = Ran("situ", "native", "wide", "one row", 1e-6, 1e-5, "sums")
EXACT = Ran("indexer_topk", "native", "wide", "ties", 0.0, 0.0, "integers")
BAD = Ran("situ", "native", "narrow", "one row", 1e-4, 1e-5, "sums")
BROKEN = Ran("situ", "triton", None, "one row", float("inf"), 1e-5, "raised ValueError: no")
SKIPPED = Skipped("situ", "native", None, "odd", "sizes must be multiples of 16")


@pytest.fixture
def run(monkeypatch):
    def invoke(report, *arguments):
        monkeypatch.setattr("perilune.verify.ops.verify_ops", lambda op, backend, on_case: report)
        return CliRunner().invoke(verify.app, ["ops", *arguments])

    return invoke


def test_nothing_failed_is_exit_code_0(run):
    result = run(OpsReport(("wide",), ran=[GOOD, EXACT], skipped=[SKIPPED, SKIPPED]))
    assert result.exit_code == 0
    assert "skipped   2: situ, native: sizes must be multiples of 16" in result.output
    assert result.output.endswith("ran 2, skipped 2, failed 0\n")


def test_a_failure_is_exit_code_1_and_told_with_its_error_and_tolerance(run):
    result = run(OpsReport(("wide",), ran=[GOOD, BAD]))
    assert result.exit_code == 1
    assert "FAILED situ, native, narrow, one row: error 1.00e-04, allowed 1.00e-05 (sums)" in result.output


def test_json_holds_ran_skipped_and_failed(run):
    result = run(OpsReport(("wide",), ran=[GOOD, EXACT, BAD, BROKEN], skipped=[SKIPPED]), "--json")
    report = json.loads(result.output, parse_constant=pytest.fail)
    assert (result.exit_code, report["ran"], report["isas"]) == (1, 4, ["wide"])
    assert [(skip["case"], skip["reason"]) for skip in report["skipped"]] == [("odd", SKIPPED.reason)]
    assert [(run["isa"], run["error"]) for run in report["failed"]] == [("narrow", 1e-4), (None, None)]
    shares = {(row["op"], row["isa"]): row["share_of_tolerance"] for row in report["implementations"]}
    assert shares == {
        ("indexer_topk", "wide"): 0.0,
        ("situ", "narrow"): pytest.approx(10),
        ("situ", "wide"): pytest.approx(0.1),
        ("situ", None): None,
    }
