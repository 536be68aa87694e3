"""A draft model from its directory, made to fit the target that it drafts for."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from perilune.checkpoint.draft import load_draft_state
from perilune.config.draft import DraftConfig, DraftOverrides, check_fit, load_draft_config
from perilune.config.engine import DRAFT_FOLDER, DSPARK, NGRAM, NGRAM_DRAFTS, OFF, EngineConfig
from perilune.config.model import ModelConfig
from perilune.errors import ConfigError
from perilune.models.draft.model import DraftModel, build_draft
from perilune.models.model import KimiModel


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft that fits its target, mapped; it drafts up to `num_drafts` tokens at once."""

    directory: Path
    config: DraftConfig
    state: dict[str, Tensor]
    num_drafts: int

    def build(self, target: KimiModel) -> DraftModel:
        """The draft beside its target, in the target's compute dtype."""
        embed_tokens, lm_head = target.model.embed_tokens, target.lm_head
        return build_draft(self.config, self.state, embed_tokens, lm_head, target.dtype)


def open_draft(checkpoint: Path, settings: EngineConfig, target: ModelConfig) -> DraftCheckpoint | None:
    """The draft that the settings name, checked against the target; None where they name none.

    Raises ConfigError or CheckpointError for a draft that cannot serve this target.
    """
    if settings.speculative in (OFF, NGRAM):
        return None
    directory = checkpoint / DRAFT_FOLDER if settings.speculative == DSPARK else Path(settings.speculative)
    if not directory.is_dir():
        raise ConfigError(
            f"speculative is {settings.speculative}, but {directory} is no directory: give one with a draft's "
            f"config.json, or {OFF} or {NGRAM}"
        )
    config = load_draft_config(directory, DraftOverrides(settings.draft_rope_theta, settings.draft_rope_interleaved))
    num_drafts = settings.num_drafts or config.num_trained_drafts or NGRAM_DRAFTS
    check_fit(config, target, num_drafts)
    return DraftCheckpoint(directory, config, load_draft_state(directory, config), num_drafts)
