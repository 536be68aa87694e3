"""Passes of a model in training over batches of dialogues."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel
from train.run import IGNORED_TARGET, _targets
from train.skills.supply import SkillBatch


def forward_batch(model: KimiModel, batch: SkillBatch, logits_rows: Tensor | None = None) -> ForwardBatch:
    """The pass over a batch, with its pictures embedded."""
    whole = ForwardBatch.whole(batch.token_ids, logits_rows)
    if batch.patches is None:
        return whole
    assert model.vision is not None
    embeddings = model.vision(batch.patches, batch.grids)
    return replace(whole, image_rows=batch.image_rows, image_embeddings=embeddings)


def answer_loss(model: KimiModel, batch: SkillBatch) -> Tensor:
    """Mean cross entropy of what must be emitted."""
    rows, targets = _targets(batch.token_ids, batch.loss_mask)
    return F.cross_entropy(model(forward_batch(model, batch, rows)), targets, ignore_index=IGNORED_TARGET)
