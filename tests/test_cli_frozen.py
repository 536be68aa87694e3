"""The options of the command line. A new one needs a reason or a removed one; change this list on purpose."""

import typer

from perilune.cli.main import app

SAMPLING = ["--max-tokens", "--seed", "--temperature", "--top-p"]
TALKING = ["--effort", "--system"]
QUANTISED = ["--activations", "--dense-weights"]
CACHED = ["--cache-dtype", "--index-cache-dtype"]
DRAFTED = ["--draft-rope-interleaved", "--draft-rope-theta", "--draft-rule", "--num-drafts", "--speculative"]
ENGINE = [
    "--expert-cache-memory",
    "--memory-budget",
    "--dtype",
    "--max-model-len",
    "--threads",
    *QUANTISED,
    *CACHED,
    *DRAFTED,
]
OPTIONS = {
    "perilune": ["--version"],
    "perilune serve": [
        *["--prefix-cache", "--state-cache-memory", "--state-interval"],
        *["CHECKPOINT", "--api-key", "--cache-memory", "--drain-timeout", "--host", "--max-num-batched-tokens"],
        *["--allow-image-urls", "--image-cache-memory", "--max-num-seqs", "--num-blocks", "--port"],
        *["--debug-routes", "--engine-process", "--grammar-backend", "--log-format", "--log-level", "--step-timeout"],
        *["--max-itl", "--max-waiting", "--profile", "--request-timeout", "--scheduling-policy"],
        *["--host-cache-bytes", "--kv-dir", "--kv-dir-bytes", "--served-model-name", *ENGINE],
    ],
    "perilune chat": ["CHECKPOINT", "--api-key", "--image", "--model", "--url", *SAMPLING, *TALKING, *ENGINE],
    "perilune generate": [
        *["CHECKPOINT", "--chat", "--image", "--prompt", "--stop", "--top-k", *SAMPLING, *TALKING, *ENGINE],
    ],
    "perilune inspect": ["PATH", "--config", "--json", "--precision"],
    "perilune make-checkpoint": [
        *["--arch", "--dense-size", "--expert-size", "--experts", "--experts-per-token", "--heads", "--hidden-size"],
        *["--latent-size", "--layers", "--out", "--preset", "--seed", "--vision", "--vocab-size"],
    ],
    "perilune plan": [
        *["CHECKPOINT", "--concurrency", "--config", "--context", "--hardware", "--json", "--nodes", "--plot"],
    ],
    "perilune render": ["REQUEST", "--json", "--tokenizer"],
    "perilune bench": [],
    "perilune bench comm": ["--json"],
    "perilune bench ops": ["--json", "--op", "--threads"],
    "perilune bench prefill": [
        *[
            "CHECKPOINT",
            "--activations",
            "--cache-dtype",
            "--dense-weights",
            "--dtype",
            "--index-cache-dtype",
            "--json",
        ],
        *["--max-num-batched-tokens", "--repeats", "--threads", "--tokens"],
    ],
    "perilune bench decode": [
        *["CHECKPOINT", "--activations", "--batch", "--cache-dtype", "--context", "--dense-weights", "--dtype"],
        *["--index-cache-dtype", "--json", "--num-drafts", "--speculative", "--threads", "--tokens"],
    ],
    "perilune bench serve": [
        *[
            "CHECKPOINT",
            "--api-key",
            "--concurrency",
            "--goodput",
            "--input-len",
            "--json",
            "--model",
            "--num-prefixes",
        ],
        *["--num-prompts", "--output-len", "--prefix-len", "--range-ratio", "--request-rate", "--seed"],
        *["--server-flags", "--text-file", "--tool-len", "--tool-pause", "--turns", "--url", "--vocab-size"],
    ],
    "perilune bench stream": [
        *["CHECKPOINT", "--activations", "--cache", "--dense-weights", "--dtype", "--json", "--page-faults"],
        *["--threads", "--tokens"],
    ],
    "perilune verify": [],
    "perilune verify quality": ["CHECKPOINT", "--json", "--questions", "--setting", "--skill"],
    "perilune verify ops": ["--backend", "--json", "--op"],
    "perilune verify logits": [
        "CHECKPOINT",
        "--backend",
        "--dtype",
        "--golden",
        "--json",
        "--mode",
        *QUANTISED,
        *CACHED,
    ],
}


def listed(command, path: str) -> dict[str, list[str]]:
    names = [name for p in command.params for name in (p.opts if p.opts[0].startswith("-") else [p.opts[0].upper()])]
    found = {path: sorted(name for name in names if name != "--help")}
    for name, child in getattr(command, "commands", {}).items():
        found |= listed(child, f"{path} {name}")
    return found


def test_the_options_are_those_that_were_agreed():
    assert listed(typer.main.get_command(app), "perilune") == {path: sorted(names) for path, names in OPTIONS.items()}
