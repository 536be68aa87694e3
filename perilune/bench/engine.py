"""An engine whose requests can start behind a context that nobody computed, and go on with random tokens."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from perilune import ops
from perilune.cache.manager import CacheManager
from perilune.cache.spec import CacheGroupSpec, bytes_per_slot, bytes_per_token
from perilune.cache.storage import CacheStorage
from perilune.config.engine import EngineConfig
from perilune.config.model import ModelConfig
from perilune.engine.core import CoreLimits, EngineCore
from perilune.engine.request import GenerateRequest
from perilune.engine.steps.runner import ModelRunner
from perilune.errors import CapacityError, CheckpointError
from perilune.models.dsa import KEY_GROUP
from perilune.models.mla import LATENT_GROUP
from perilune.models.model import KimiModel
from perilune.ops.packed_rows.layout import is_packed
from perilune.platform import available_memory_bytes
from perilune.sampling.params import SamplingParams

# entries of a recurrent state and of a convolution's window stay well within what real ones reach
_STATE_SCALE = 0.1
# rows that are drawn at once before they are packed
_ROWS_AT_ONCE = 4096


class BenchEngine(EngineCore):
    """The engine as it serves, without a tokenizer. Room for `num_seqs` requests of `max_len` tokens."""

    def __init__(self, model: KimiModel, config: EngineConfig, *, num_seqs: int, max_len: int):
        dtype = str(model.dtype).removeprefix("torch.")
        self._groups, block_size = model.cache_groups(), config.block_size
        # one more than each needs, so that nobody is preempted
        num_blocks = num_seqs * (-(-max_len // block_size) + 1)
        _check_room(self._groups, dtype, num_blocks * block_size, num_seqs)
        self._storage = CacheStorage(
            self._groups, num_blocks=num_blocks, block_size=block_size, num_slots=num_seqs, dtype=dtype
        )
        super().__init__(
            ModelRunner(model, self._storage, block_size=block_size),
            CacheManager(num_blocks=num_blocks, block_size=block_size, num_slots=num_seqs),
            CoreLimits(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=max(config.max_num_batched_tokens, num_seqs),
                max_model_len=max_len,
                vocab_size=model.config.vocab_size,
                eos_token_ids=(model.config.eos_token_id,),
            ),
            tokenizer=None,
        )
        self._random = random.Random(0)
        self._widths = _row_widths(model.config)

    def fill_cache(self) -> None:
        """Put random rows and states into the whole cache."""
        generator = torch.Generator().manual_seed(0)
        for group in self._groups:
            view = self._storage.views[group.name]
            if group.kind == "paged" and is_packed(view.dtype):
                for pool in view:
                    _fill_packed(pool, *self._widths[group.name], generator)
            else:
                view.normal_(std=1.0 if group.kind == "paged" else _STATE_SCALE, generator=generator)

    def step_or_raise(self) -> None:
        """Run one step; what failed in it is an error here."""
        for output in self.step():
            if output.error is not None:
                raise CheckpointError(f"request {output.request_id} failed: {output.error}")

    def add_prompt(self, num_tokens: int) -> None:
        """Queue a prompt of random tokens that ends with its first new token."""
        self._add("prompt", num_tokens, max_tokens=1)

    def add_behind(self, request_id: str, context: int) -> None:
        """Queue a request that decodes its first token behind `context` tokens whose rows the cache holds already."""
        self._add(request_id, context + 1, max_tokens=None)
        self._live[request_id].request.num_computed_tokens = context

    def redraw_tokens(self) -> None:
        """Replace every request's newest token, or a random model would fall into one token and the same experts."""
        for live in self._live.values():
            live.request.token_ids[-1] = self._random.randrange(self.limits.vocab_size)

    def _add(self, request_id: str, num_tokens: int, max_tokens: int | None) -> None:
        token_ids = tuple(self._random.choices(range(self.limits.vocab_size), k=num_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.add(GenerateRequest(request_id, token_ids, params))


def _row_widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """By paged group: how many columns of a packed row are quantised, and how many it has."""
    widths = {LATENT_GROUP: (config.mla.kv_lora_rank, config.mla.cache_width)}
    if config.indexer is not None:
        widths[KEY_GROUP] = (config.indexer.head_dim, config.indexer.head_dim)
    return widths


def _fill_packed(pool: Tensor, num_scaled: int, num_columns: int, generator: torch.Generator) -> None:
    """Random rows, packed, into all of pool [blocks, block_size, bytes]."""
    for slots in torch.arange(pool.shape[0] * pool.shape[1]).split(_ROWS_AT_ONCE):
        ops.store_packed_rows(pool, slots, torch.randn(slots.shape[0], num_columns, generator=generator), num_scaled)


def _check_room(groups: Sequence[CacheGroupSpec], dtype: str, num_tokens: int, num_seqs: int) -> None:
    needed = num_tokens * bytes_per_token(groups, dtype) + num_seqs * bytes_per_slot(groups, dtype)
    available = available_memory_bytes()
    if needed > available:
        raise CapacityError(
            f"the cache of {num_seqs} sequence(s) takes {needed} bytes and {available} are free: "
            "ask for fewer sequences or tokens"
        )
