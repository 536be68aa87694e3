"""How the command starts and how it fails."""

import subprocess
import sys

import pytest

from perilune import __version__, env
from perilune.cli import main as cli
from perilune.errors import CheckpointError

COMMANDS = ("bench", "serve", "chat", "generate", "inspect", "make-checkpoint", "render", "verify")


def run(monkeypatch, capsys, *arguments):
    """Exit code and what was printed to stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["perilune", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    printed = capsys.readouterr()
    return exited.value.code, printed.out, printed.err


def test_help_names_every_command(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_loads_no_heavy_module(arguments):
    code = (
        f"import sys\nsys.argv = ['perilune', *{arguments!r}]\nfrom perilune.cli.main import main\ntry:\n    main()\n"
    )
    code += "except SystemExit as exited:\n    assert not exited.code\n"
    code += "heavy = {'torch', 'fastapi', 'uvicorn', 'tiktoken', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"perilune {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--loud"], "--loud"),
        (["sing"], "sing"),
        (["serve", "--prot", "8000"], "--prot"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["chat", "--temperature"], "--temperature"),
        (["serve", "--cache-memory", "lots"], "lots"),
        (["serve", "--cache-memory", "9" * 400], "--cache-memory"),
        (["serve", "--cache-memory", "1G", "--num-blocks", "5"], "num_blocks"),
        (["serve", "--dtype", "float8"], "float8"),
        (["serve", "/no/such/place", "--port", "0"], "/no/such/place"),
        (["serve", "--api-key", " "], "api_key"),
        (["serve", "--api-key", ""], "api_key"),
        (["serve", "--host", "a..b"], "a..b"),
        (["generate", "/no/such/place", "--prompt", "x"], "/no/such/place"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--chat", "y"], "--chat"),
        (["generate", "--prompt", "x", "--system", "y"], "--system"),
        (["generate", "--chat", "x", "--temperature", "-1"], "temperature"),
        (["chat", "--model", "m"], "--model"),
        (["chat", "--url", "127.0.0.1:8000", "--threads", "2"], "--threads"),
        (["chat", "--url", "ftp://host"], "ftp://host"),
        (["chat", "--url", "http://host:port"], "http://host:port"),
        (["chat", "--url", "http://127.0.0.1:1"], "is the server running?"),
        (["chat", "--url", "http://a..b"], "http://a..b does not answer"),
        (["make-checkpoint", "--out", "/dev/null/x"], "--out /dev/null/x"),
    ],
    ids=" ".join,
)
def test_what_a_person_gets_wrong_is_one_message_and_exit_code_2(monkeypatch, capsys, arguments, named):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


def test_an_error_of_ours_keeps_its_message(monkeypatch, capsys, tmp_path):
    def fail(*_, **__):
        raise CheckpointError("shard 3 is short")

    monkeypatch.setattr("perilune.verify.logits.verify_logits", fail)
    code, _, err = run(monkeypatch, capsys, "verify", "logits", str(tmp_path), "--golden", str(tmp_path))
    assert (code, err) == (2, "error: shard 3 is short\n")


def test_an_unknown_variable_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("PERILUNE_APIKEY", "x")
    code, _, err = run(monkeypatch, capsys, "--version")
    assert code == 2
    assert env.API_KEY.name in err


def test_the_module_runs_as_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "perilune.cli.main", "--version"], capture_output=True, text=True, check=False
    )
    assert result.stdout == f"perilune {__version__}\n"
