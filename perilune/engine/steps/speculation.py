"""Puts together what an engine guesses with: who guesses, what verified tokens leave, and what steps cost."""

import logging

from perilune.cache.spec import bytes_per_slot
from perilune.cache.storage import CacheStorage
from perilune.config.engine import BLOCK, MATCHING, NGRAM, NGRAM_DRAFTS, EngineConfig
from perilune.engine.memory import CachePlan
from perilune.engine.steps.costs import CostMeter
from perilune.engine.steps.drafting import Drafting, Proposer
from perilune.engine.steps.owed import OwedRows
from perilune.engine.steps.proposers import DraftProposer, NgramProposer
from perilune.engine.steps.runner import ModelRunner
from perilune.models.draft.model import DraftModel
from perilune.models.draft.tapped import TappedModel, owed_bytes
from perilune.models.model import KimiModel
from perilune.speculative.policy import GOOD, DraftPolicy
from perilune.speculative.verify import accept_block, accept_tokens

_LOG = logging.getLogger(__name__)


def num_verified_rows(config: EngineConfig, num_drafts: int) -> int:
    """Most tokens of one step that may be taken back."""
    return min(config.max_num_seqs * (1 + num_drafts), config.max_num_batched_tokens)


class Speculation:
    """The plan of an engine's guessing. `draft` is None for copies of the text; `dtype` is the compute dtype's name."""

    def __init__(self, model: KimiModel, draft: DraftModel | None, config: EngineConfig, dtype: str):
        self.model, self.draft, self._config, self._dtype = model, draft, config, dtype
        trained = None if draft is None else draft.config.num_trained_drafts
        self.num_drafts = config.num_drafts or trained or NGRAM_DRAFTS
        self._tapped = None if draft is None else TappedModel(model, draft)
        self._num_rows = num_verified_rows(config, self.num_drafts)

    @staticmethod
    def of(model: KimiModel, draft: DraftModel | None, config: EngineConfig, dtype: str) -> "Speculation | None":
        """None where nobody guesses."""
        guesses = draft is not None or config.speculative == NGRAM
        return Speculation(model, draft, config, dtype) if guesses else None

    @property
    def served(self) -> KimiModel | TappedModel:
        """The model whose passes steps run."""
        return self._tapped or self.model

    @property
    def record_bytes(self) -> int:
        """Bytes of what verified tokens leave in a step and of what plain steps owe, beside the cache."""
        owed = 0 if self.draft is None else owed_bytes(self.draft.config, self.draft.dtype.itemsize)
        return owed + self._num_rows * bytes_per_slot(self.model.record_groups(), self._dtype)

    def drafting(self, storage: CacheStorage) -> Drafting:
        """The part that steps use, over the target's cache."""
        proposer: Proposer = NgramProposer()
        owed = None
        draws = self._config.draft_rule != MATCHING
        if self.draft is not None and self._tapped is not None:
            block_size = self._config.block_size
            proposer = DraftProposer(self.draft, storage.views, self.num_drafts, block_size, draws=draws)
            owed = OwedRows(self._tapped, storage.views, block_size)
        # the chances of guesses that are drawn may not decide how many are verified
        gives_chances = self.draft is not None and self.draft.config.has_confidence_head and not draws
        policy = DraftPolicy(self.num_drafts, is_model=self.draft is not None, gives_chances=gives_chances)
        records = CacheStorage(
            self.model.record_groups(), num_blocks=0, block_size=1, num_slots=self._num_rows, dtype=self._dtype
        )
        judge = accept_block if self._config.draft_rule == BLOCK else accept_tokens
        return Drafting(proposer, policy, self.model.commit, storage, records, judge=judge, owed=owed)

    def measure(self, runner: ModelRunner, drafting: Drafting, plan: CachePlan) -> None:
        """Has the policy know what steps cost, by running some over the cache, which nobody uses yet."""
        meter = CostMeter(
            runner,
            drafting,
            max_num_seqs=self._config.max_num_seqs,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            vocab_size=self.model.config.vocab_size,
        )
        costs = meter.measure()
        if costs is None:
            return
        drafting.policy.costs = costs
        if self.draft is not None and not costs.can_pay(self.num_drafts):
            _LOG.warning(
                "guessing with this draft stays off: here it would not pay for any number of answers if %.0f %% of its "
                "guesses were right at each place",
                100 * GOOD,
            )
            drafting.switch(is_on=False)
            return
        meter.prepare()
