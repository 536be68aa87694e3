"""`perilune inspect`: what a checkpoint or a configuration holds and costs; only --precision reads weights."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.config.model import ModelConfig

_PART_COLUMNS = ("tensors", "parameters", "parameters_active", "bytes")


def inspect_command(
    path: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; every header is checked.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json alone, without a checkpoint.", show_default=False)
    ] = None,
    precision: Annotated[
        bool, typer.Option("--precision", help="Read every weight: which 8-bit formats hold it without rounding.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show parts, tensors, bytes, parameters and cache sizes of a checkpoint or of a configuration."""
    if precision:
        if path is None or config is not None:
            raise ConfigError("--precision reads weights; give a checkpoint directory, and no --config")
        from perilune.cli.precision import precision_report, render_precision

        found = precision_report(path, with_tensors=as_json)
        typer.echo(json.dumps(found, indent=2) if as_json else render_precision(found))
        return
    if path is not None and config is None:
        report = inspect_checkpoint(path)
    elif config is not None and path is None:
        report = inspect_config(config)
    else:
        raise ConfigError("give either a checkpoint directory or --config FILE, and not both")
    typer.echo(json.dumps(report, indent=2) if as_json else render(report))


def inspect_config(file: Path) -> dict[str, Any]:
    """The account of a configuration alone, as JSON values; raises ConfigError."""
    from perilune.config.parse import load_model_config

    return _report(load_model_config(file))


def inspect_checkpoint(directory: Path) -> dict[str, Any]:
    """The account of a checkpoint whose every header agrees with its configuration; raises CheckpointError."""
    from perilune.checkpoint.check import check_index
    from perilune.checkpoint.index import read_index
    from perilune.config.parse import load_model_config

    config, index = load_model_config(directory), read_index(directory)
    check_index(index, config)
    stored = {"files": index.num_files, "tensors": len(index.entries), "total_size": index.total_size}
    return {**_report(config), **stored}


def _report(config: "ModelConfig") -> dict[str, Any]:
    from perilune.models.accounting import account, cache_bytes_per_token, flops_per_token, state_bytes_per_sequence

    totals = account(config)
    return {
        "arch": config.arch,
        "layers": {
            "kda": len(config.kda_layers),
            "full_attention": len(config.full_attn_layers),
            "dense": config.first_k_dense_replace,
            "moe": config.num_hidden_layers - config.first_k_dense_replace,
        },
        "tensors": totals.tensors,
        "total_size": totals.total_size,
        "parameters_total": totals.parameters_total,
        "parameters_active": totals.parameters_active,
        "parameters_vision": totals.parameters_vision,
        "decode_weight_bytes": totals.decode_weight_bytes,
        "flops_per_token": flops_per_token(config, context=1),
        "cache_bytes_per_token": cache_bytes_per_token(config),
        "cache_bytes_per_token_fp8": cache_bytes_per_token(config, "fp8_ds_mla", "fp8"),
        "state_bytes_per_sequence": state_bytes_per_sequence(config),
        "parts": {str(part): asdict(values) for part, values in totals.parts.items()},
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    layers = report["layers"]
    name = "Kimi K3.1 Pro" if report["arch"] == "k31" else "Kimi K3"
    mixers = f"{layers['kda']} KDA and {layers['full_attention']} full attention layers"
    lines = [
        f"{name} layout: {mixers}, {layers['dense']} dense and {layers['moe']} MoE",
        "",
        f"{'part':<20}" + "".join(f"{column.replace('parameters_', ''):>22}" for column in _PART_COLUMNS),
    ]
    for part, values in report["parts"].items():
        lines.append(f"{part:<20}" + "".join(f"{values[column]:>22,}" for column in _PART_COLUMNS))
    rows = {
        "tensors": "tensors",
        "bytes of tensors": "total_size",
        "text parameters": "parameters_total",
        "  active per token": "parameters_active",
        "vision parameters": "parameters_vision",
        "weight bytes read per decode step": "decode_weight_bytes",
        "operations per token, short context": "flops_per_token",
        "cache bytes per token (bfloat16)": "cache_bytes_per_token",
        "cache bytes per token (--cache-dtype and index fp8)": "cache_bytes_per_token_fp8",
        "state bytes per sequence (float32, convolution bfloat16)": "state_bytes_per_sequence",
    }
    lines += ["", *(f"{label:<58}{report[key]:>24,}" for label, key in rows.items())]
    if "files" in report:
        lines += ["", f"All headers of {report['files']} file(s) agree with config.json."]
    return "\n".join(lines)
