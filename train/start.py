"""Where a stage begins: a checkpoint's weights as trainable parameters, with rows for new tokens and new eyes."""

from pathlib import Path

import torch
from torch import Tensor

from perilune.checkpoint.loader import load_state
from perilune.config.model import ModelConfig, NormEps
from perilune.config.parse import load_model_config
from perilune.models.model import KimiModel, trainable_model
from perilune.ops.mxfp4.reference import mxfp4_dequantize
from perilune.text.tokenizer import Tokenizer
from train.model import initialised_model
from train.skills.growth import grow_state


def trainable_state(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors by the parameter names of a trainable model, float32; experts are stacked."""
    state = load_state(directory, config)
    names = [name for name, _ in trainable_model(config, NormEps()).named_parameters()]
    return {name: _experts(state, name, config) if name not in state else state[name].float() for name in names}


def _experts(state: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """[experts, out, in] of `...experts.w1`."""
    base, _, weight = name.rpartition(".")
    stored = (f"{base}.{expert}.{weight}" for expert in range(config.moe.num_experts))
    return torch.stack([mxfp4_dequantize(state[f"{x}.weight_packed"], state[f"{x}.weight_scale"]) for x in stored])


def started_model(config: ModelConfig, start: Path | None, tokenizer: Tokenizer, seed: int) -> KimiModel:
    """A model of `config` with dense attention: new where `start` is None or has no such parameter.

    `start` may have fewer ranks than `tokenizer`, whose ranks begin with the same ones.
    """
    model = initialised_model(config, seed)
    if start is None:
        return model
    state = trainable_state(start, load_model_config(start))
    known = Tokenizer.load(start)
    if known.num_ranks != tokenizer.num_ranks:
        state = grow_state(state, known, tokenizer)
    own = model.state_dict()
    model.load_state_dict({name: state[name].view(own[name].shape) if name in state else own[name] for name in own})
    return model
