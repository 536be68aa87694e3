"""A model whose every next token depends on all earlier ones, through the paged rows and through the state.

A wrong block, slot, position or a stale value gives other tokens than `expected_tokens`, which needs no cache.
"""

from itertools import accumulate, pairwise

import torch

from perilune.cache.manager import CacheManager
from perilune.cache.sealing import SealPolicy
from perilune.cache.spec import CacheGroupSpec
from perilune.cache.storage import CacheStorage
from perilune.cache.tiers.ledger import TierLedger
from perilune.engine.core import CoreLimits, EngineCore
from perilune.engine.steps.runner import ModelRunner
from perilune.engine.steps.transfers import TierTransfers

VOCAB = 61
EOS = 60
NAN_TOKEN = 59
CRASH_TOKEN = 58
MODULUS = 997


def _advance(state, token_id):
    return (state * 31 + token_id + 1) % MODULUS


def logits_of(state, row_sum):
    """Logits [VOCAB] for a state and a sum of rows, both whole numbers; special ids are never the best."""
    values = torch.cos(torch.arange(VOCAB) * (1.0 + state * 0.37) + row_sum * 0.11) * 3
    values[NAN_TOKEN] = values[CRASH_TOKEN] = values[EOS] = -20.0
    return values


def expected_tokens(prompt, count):
    """The greedy continuation, from the definition."""
    token_ids = list(prompt)
    for _ in range(count):
        state = 0
        for token_id in token_ids:
            state = _advance(state, token_id)
        row_sum = sum(token_id * (position + 1) for position, token_id in enumerate(token_ids)) % MODULUS
        token_ids.append(int(logits_of(state, row_sum).argmax()))
    return tuple(token_ids[len(prompt) :])


class CountingModel:
    """`batches` keeps every batch it was given, `inference_modes` whether gradients were off in the strictest way."""

    def __init__(self):
        self.batches = []
        self.faults = {}
        self.inference_modes = []

    def take_faults(self):
        faults, self.faults = self.faults, {}
        return faults

    def way(self, longest):
        return 0

    def cache_groups(self):
        return (
            CacheGroupSpec("rows", "paged", num_layers=1, row_shape=(2,), dtype="float32"),
            CacheGroupSpec("states", "state", num_layers=1, row_shape=(1,), dtype="float32"),
        )

    def __call__(self, batch):
        self.batches.append(batch)
        self.inference_modes.append(torch.is_inference_mode_enabled())
        if CRASH_TOKEN in batch.token_ids:
            raise RuntimeError("the model met a token that it cannot stand")
        rows = batch.cache["rows"][0]
        bounds = list(pairwise(batch.cu_seqlens.tolist()))
        ends = batch.seq_lens.tolist()
        positions = [torch.arange(end - (last - first), end) for end, (first, last) in zip(ends, bounds, strict=True)]
        values = torch.where(batch.token_ids == NAN_TOKEN, torch.nan, batch.token_ids.float())
        rows.view(-1, 2)[batch.slot_mapping] = torch.stack([values, torch.cat(positions).float()], dim=1)
        logits = []
        copies = seal_copies(batch)
        for index, (first, last) in enumerate(bounds):
            logits += self._sequence(batch, index, values[first:last], rows)
            batch.seal_states("states", 0, copies.get(index))
        return torch.stack(logits)[batch.logits_rows]

    def _sequence(self, batch, index, values, rows):
        slot = batch.state_slots[index]
        states = batch.cache["states"][0]
        table = rows[batch.block_table[index]].view(-1, 2)
        end = int(batch.seq_lens[index])
        assert table[:end, 1].tolist() == list(range(end)), "rows of other positions lie in the block table"
        logits = []
        for offset, value in enumerate(values):
            states[slot] = _advance(states[slot], value)
            seq_len = end - len(values) + offset + 1
            weights = torch.arange(1, len(table) + 1) * (torch.arange(len(table)) < seq_len)
            # rows past the sequence weigh nothing, but a stale NaN in them would show
            row_sum = (table[:, 0] * weights).sum() % MODULUS
            logits.append(logits_of(float(states[slot]), float(row_sum)))
        return logits


def seal_copies(batch):
    """What is copied behind each sequence that ends a round."""
    ends = accumulate(seals.num_sequences for seals in batch.seals)
    return {end - 1: seals.copies for end, seals in zip(ends, batch.seals, strict=True)}


def make_core(
    *,
    tokenizer=None,
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    budget=32,
    max_model_len=200,
    num_kept=8,
    keeps=True,
    max_itl_s=None,
    has_priorities=False,
    max_waiting=None,
    stack=None,
    **options,
):
    """A core over a CountingModel, which is its attribute `model`; `options` go to EngineCore.

    Prefixes are kept unless told not to, with `num_kept` slots besides those of running requests, and what is evicted
    goes to the tiers of `stack`.
    """
    model = CountingModel()
    storage = CacheStorage(
        model.cache_groups(),
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=max_num_seqs + num_kept,
        dtype="float32",
    )
    tiers = None if stack is None else TierTransfers(storage, stack)
    core = EngineCore(
        ModelRunner(model, storage, block_size=block_size, tiers=tiers),
        CacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=max_num_seqs + num_kept,
            policy=SealPolicy(interval=16) if keeps else None,
            ledger=None if stack is None else TierLedger(stack.find, block_size),
        ),
        CoreLimits(
            max_num_seqs,
            budget,
            max_model_len,
            VOCAB,
            (EOS,),
            max_itl_s=max_itl_s,
            has_priorities=has_priorities,
            max_waiting=max_waiting,
        ),
        tokenizer,
        tiers=tiers,
        **options,
    )
    return core, model


def run(core, messages):
    """Add all messages and step to the end: outputs by request id, accounts checked after each step."""
    outputs = {}
    for message in messages:
        core.add(message)
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def tokens_of(outputs):
    return tuple(token_id for output in outputs for token_id in output.token_ids)
