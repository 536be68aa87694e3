"""One short measurement through real servers."""

import json

from typer.testing import CliRunner

from perilune.cli.main import app


def test_the_demo_answers_sums_in_every_way_of_asking():
    given = ["verify", "quality", "--questions", "3", "--skill", "sums", "--skill", "pictures"]
    result = CliRunner().invoke(app, [*given, "--setting", "streaming", "--setting", "prefix cache", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [setting["name"] for setting in found["settings"]] == ["bf16, batch 1", "prefix cache", "streaming"]
    for setting in found["settings"]:
        assert setting["skills"]["sums"] == {"asked": 3, "exact": 3, "refusal": None}
        assert "vision" in setting["skills"]["pictures"]["refusal"]
