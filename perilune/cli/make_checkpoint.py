"""`perilune make-checkpoint`: random weights in the released layout, of a size that the flags choose."""

import base64
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.config.media import PREPROCESSOR_FILE, MediaConfig, media_config_to_dict
from perilune.errors import CapacityError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from perilune.config.model import ModelConfig

DEMO_RANK_FILE = Path(__file__).parent.parent / "demo" / "tiktoken.model"


class Preset(StrEnum):
    """Starting points of the sizes."""

    TINY = "tiny"
    K3_SLICE = "k3-slice"


class Arch(StrEnum):
    """The two architectures."""

    K3 = "k3"
    K31 = "k31"


def make_checkpoint_command(
    out: Annotated[Path, typer.Option(help="New or empty directory.", show_default=False)],
    preset: Annotated[
        Preset, typer.Option(help="tiny: for tests; k3-slice: a few layers of the real widths.")
    ] = Preset.TINY,
    arch: Annotated[Arch, typer.Option(help="k3: Kimi K3; k31: Kimi K3.1 Pro.")] = Arch.K31,
    vision: Annotated[bool, typer.Option("--vision", help="Add the vision tower and its projector.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.", min=0)] = 0,
    layers: Annotated[int | None, typer.Option(help="num_hidden_layers; the first is dense.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="hidden_size.")] = None,
    heads: Annotated[int | None, typer.Option(help="num_attention_heads, of both kinds of attention.")] = None,
    dense_size: Annotated[int | None, typer.Option(help="intermediate_size of the dense layer.")] = None,
    experts: Annotated[int | None, typer.Option(help="num_experts.")] = None,
    experts_per_token: Annotated[int | None, typer.Option(help="num_experts_per_token.")] = None,
    expert_size: Annotated[int | None, typer.Option(help="moe_intermediate_size.")] = None,
    latent_size: Annotated[int | None, typer.Option(help="routed_expert_hidden_size.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="vocab_size; 256 of them are control ids.")] = None,
) -> None:
    """Write a checkpoint with random weights and the demo's rank file."""
    from perilune.config.presets import MIN_VOCAB_SIZE, NUM_CONTROL_IDS, preset_config
    from perilune.text.rank_file import read_rank_file

    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": dense_size,
        "num_experts": experts,
        "num_experts_per_token": experts_per_token,
        "moe_intermediate_size": expert_size,
        "routed_expert_hidden_size": latent_size,
        "vocab_size": vocab_size,
    }
    given = {key: size for key, size in sizes.items() if size is not None}
    if preset is Preset.TINY:
        given.setdefault("vocab_size", len(read_rank_file(DEMO_RANK_FILE)) + NUM_CONTROL_IDS)
    if given.get("vocab_size", MIN_VOCAB_SIZE) < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size is {vocab_size}; allowed: at least {MIN_VOCAB_SIZE}, the bytes and the control ids"
        )
    config = preset_config(preset.value, arch.value, has_vision=vision, sizes=given)
    write_random_checkpoint(out, config, seed)
    typer.echo(f"{out}: random weights; perilune inspect {out} shows what is in it")


def write_random_checkpoint(directory: Path, config: "ModelConfig", seed: int) -> None:
    """Writes weights, index, config.json, tiktoken.model and, with a tower, how it wants its pictures.

    Raises CheckpointError when `directory` is not empty.
    """
    from tqdm import tqdm

    from perilune.checkpoint.random_init import random_tensors
    from perilune.checkpoint.writer import write_checkpoint
    from perilune.models.accounting import account

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"--out {directory} exists and is not an empty directory; give a new one")
    total = account(config).total_size
    _check_space(directory, total)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"--out {directory} cannot be made: {error.strerror}; choose another") from error
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None) as bar:

        def counted() -> Iterator[tuple[str, "Tensor"]]:
            for name, tensor in random_tensors(config, seed):
                yield name, tensor
                bar.update(tensor.nbytes)

        write_checkpoint(directory, config, counted())
    write_rank_file(directory / "tiktoken.model", config.vocab_size)
    if config.vision is not None:
        text = json.dumps(media_config_to_dict(MediaConfig()), indent=1)
        (directory / PREPROCESSOR_FILE).write_text(text + "\n", encoding="utf-8")


def write_rank_file(file: Path, vocab_size: int) -> None:
    """Writes the demo's ranks, cut or extended to `vocab_size` less the control ids.

    An added token is its own id in angle brackets: text is split between digits and signs, so no text is ever
    encoded to it, and a random model that samples it shows the id.
    """
    from perilune.config.presets import NUM_CONTROL_IDS
    from perilune.text.rank_file import read_rank_file

    num_ranks = vocab_size - NUM_CONTROL_IDS
    ranks = read_rank_file(DEMO_RANK_FILE)
    tokens = sorted(ranks, key=ranks.__getitem__)[:num_ranks]
    tokens += [f"<{rank}>".encode() for rank in range(len(tokens), num_ranks)]
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    file.write_bytes(b"".join(lines))


def _check_space(directory: Path, needed: int) -> None:
    import shutil

    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CapacityError(f"--out {directory} needs {needed:,} bytes, but {parent} has {free:,} free; choose another")
