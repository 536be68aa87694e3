"""Muon for the hidden matrices, AdamW for everything else.

Muon (K. Jordan 2024; scale of the update after Moonlight, arXiv 2502.16982, section 2.2): momentum, made orthogonal by
a Newton-Schulz iteration, so that every direction of a matrix learns at the same rate.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the quintic iteration and its number of steps, as published with Muon.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_UPDATE_RMS = 0.2


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, about: [n, rows, columns] -> the same shape with singular values near 1."""
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon over matrices [rows, columns] and stacks of them [n, rows, columns]; equal shapes share one iteration."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape[-2:])].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, shape, group)

    def _update(self, parameters: list[nn.Parameter], shape: tuple[int, ...], group: dict[str, Any]) -> None:
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            directions.append(parameter.grad.lerp(momentum, group["momentum"]).view(-1, *shape))
        updates = orthogonalise(torch.cat(directions)) * (_UPDATE_RMS * max(shape) ** 0.5)
        counts = [direction.shape[0] for direction in directions]
        for parameter, update in zip(parameters, updates.split(counts), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.view_as(parameter), alpha=-group["lr"])


# Matrices that Muon is not made for: tables, filters, and maps to a few numbers.
_NOT_HIDDEN = ("embed_tokens", "lm_head", "conv1d", "res_proj", "gate.weight", "weights_proj", "pos_emb")


def optimizers(model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, logits, router, norms, convolutions and biases."""
    return optimizers_of(model.named_parameters(), matrix_lr, other_lr, weight_decay)


def optimizers_of(
    named: Iterable[tuple[str, nn.Parameter]], matrix_lr: float, other_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """The same for some of a model's parameters."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        is_hidden = parameter.dim() >= 2 and not any(word in name for word in _NOT_HIDDEN)
        (matrices if is_hidden else others).append(parameter)
    return [
        Muon(matrices, matrix_lr, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
