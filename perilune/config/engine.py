"""The engine's settings: limits, cache size, compute dtype, quantisation, and which implementation an op must use.

Says what was asked for; what a machine makes of the open values is decided where the engine is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

from perilune.config.model import ModelConfig, NormEps
from perilune.errors import ConfigError

COMPUTE_DTYPES = ("float32", "bfloat16")
STORED, INT8, FP8 = "stored", "int8", "fp8"
EXACT = "exact"
DENSE_WEIGHTS = (STORED, INT8, FP8)
ACTIVATIONS = (EXACT, INT8)
AUTO, MXFP4 = "auto", "mxfp4"
MXFP4_GROUP = 32
CACHE_DTYPES = (AUTO, FP8, INT8)
INDEX_CACHE_DTYPES = (AUTO, FP8, INT8, MXFP4)
OFF, NGRAM, DSPARK = "off", "ngram", "dspark"
MATCHING, TOKEN, BLOCK = "matching", "token", "block"
DRAFT_RULES = (MATCHING, TOKEN, BLOCK)
# where a checkpoint may bring its own draft
DRAFT_FOLDER = "draft"
# guesses of a copied continuation, where nobody says how many
NGRAM_DRAFTS = 7
FCFS, PRIORITY = "fcfs", "priority"
SCHEDULING_POLICIES = (FCFS, PRIORITY)
LLGUIDANCE, XGRAMMAR = "llguidance", "xgrammar"
GRAMMAR_BACKENDS = (LLGUIDANCE, XGRAMMAR)

# what is served when no checkpoint is named
DEMO_CHECKPOINT = Path(__file__).parent.parent / "demo"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; a wrong value raises ConfigError.

    `max_num_seqs` requests run at once and one step computes at most `max_num_batched_tokens` tokens.
    With `max_itl_ms`, a step that produces tokens of running answers takes fewer prompt tokens, so that it ends within
    so many milliseconds. `scheduling_policy` "priority" lets requests say which goes first; "fcfs" is in order of
    arrival. Beyond `max_waiting` requests that wait for one of the places, more are refused; None refuses none.
    `max_model_len` None takes the model's own context, cut to what the cache holds. The cache is sized by
    `num_blocks` (of `block_size` tokens) or by `cache_bytes`, or, with both None, by the memory that is free.
    `prefix_cache` keeps what requests leave behind for those with the same beginning: a state every `state_interval`
    tokens of a long prompt, at its end and at that of the answer. `state_cache_bytes` is the room for states besides
    those of running requests and `cache_bytes`; None takes a share of the cache.
    What the cache gives up is kept in `host_cache_bytes` of memory and, from there or at the end, in the directory
    `kv_dir`, at most `kv_dir_bytes` of it (None: 16 GiB), where the next engine with the same model and settings finds
    it.
    `image_cache_bytes` bounds the embeddings of pictures that are kept for the next request with the same picture.
    `dtype` None is bfloat16; a model that is small beside the free memory even in float32 gets float32, unless the
    processor multiplies bfloat16 much faster. `dense_weights` says what the projections of the layers (attention,
    indexer, dense and shared experts, latents) are made into at load: "stored" keeps them mapped, "int8" and "fp8"
    (E4M3) hold 8 bits and a scale per output. `activations` "int8" rounds what int8 and MXFP4 weights are multiplied
    with, per 32 columns. `cache_dtype` says what the cached rows of attention hold: "auto" the compute dtype, "fp8"
    (E4M3) and "int8" 8 bits and a scale per 128 values; `index_cache_dtype` the same for index keys, "mxfp4" 4 bits and
    a scale per 32. With `expert_cache_bytes` routed experts stay in the checkpoint's files, and so many bytes of memory
    hold those used most; None keeps them all in memory where they fit, and streams them where not.
    `memory_budget_bytes` bounds all that the engine and its server take together. `speculative` says who guesses tokens
    that a step verifies: "off" nobody, "ngram" a copy of what followed the text's end before, "dspark" the draft
    model in the checkpoint's folder `draft`, anything else is the directory of a draft model; `num_drafts` is the most
    guesses of an answer in a step, None as many as a draft's blocks yield, or 7. By `draft_rule` "matching" guesses
    change no token of any answer;
    "token" and "block" draw a draft model's guesses where answers are drawn, so that more of them stay, and keep the
    law of the answers, not the tokens of a seed. `draft_rope_theta` and `draft_rope_interleaved` are for drafts whose
    configuration leaves that open or wrong. `grammar_backend` names the library that compiles what constrains answers,
    which must be installed. `ops` maps an op's name to the backend it must use.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_itl_ms: float | None = None
    scheduling_policy: str = FCFS
    max_waiting: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    cache_bytes: int | None = None
    num_blocks: int | None = None
    prefix_cache: bool = True
    state_interval: int = 8192
    state_cache_bytes: int | None = None
    host_cache_bytes: int = 0
    kv_dir: Path | str | None = None
    kv_dir_bytes: int | None = None
    image_cache_bytes: int = 512 * 2**20
    dtype: str | None = None
    dense_weights: str = STORED
    activations: str = EXACT
    cache_dtype: str = AUTO
    index_cache_dtype: str = AUTO
    expert_cache_bytes: int | None = None
    memory_budget_bytes: int | None = None
    speculative: str = OFF
    num_drafts: int | None = None
    draft_rule: str = MATCHING
    draft_rope_theta: float | None = None
    draft_rope_interleaved: bool | None = None
    grammar_backend: str = LLGUIDANCE
    eps: NormEps = field(default_factory=NormEps)
    ops: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "state_interval", "image_cache_bytes"):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "cache_bytes", "num_blocks", "kv_dir_bytes", "num_drafts"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("expert_cache_bytes", "memory_budget_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.max_waiting is not None and (type(self.max_waiting) is not int or self.max_waiting < 0):
            raise ConfigError(f"max_waiting is {self.max_waiting!r}; it must be an integer of at least 0")
        if self.max_itl_ms is not None and not 0 < self.max_itl_ms < float("inf"):
            raise ConfigError(f"max_itl_ms is {self.max_itl_ms}; it must be a number of milliseconds above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}; "
                "a step needs room for one token of every running request: raise the first or lower the second"
            )
        if self.cache_bytes is not None and self.num_blocks is not None:
            raise ConfigError(
                f"cache_bytes is {self.cache_bytes} and num_blocks is {self.num_blocks}; "
                "both size the cache: give only one of them"
            )
        if self.state_cache_bytes is not None:
            self._check_state_cache(self.state_cache_bytes)
        self._check_tiers()
        self._check_drafting()
        if self.dtype is not None and self.dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed are {', '.join(COMPUTE_DTYPES)}")
        choices = {
            "dense_weights": DENSE_WEIGHTS,
            "activations": ACTIVATIONS,
            "cache_dtype": CACHE_DTYPES,
            "index_cache_dtype": INDEX_CACHE_DTYPES,
            "scheduling_policy": SCHEDULING_POLICIES,
            "draft_rule": DRAFT_RULES,
            "grammar_backend": GRAMMAR_BACKENDS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")
        if self.grammar_backend == XGRAMMAR and find_spec(XGRAMMAR) is None:
            raise ConfigError(
                "grammar_backend is xgrammar, which is not installed: pip install 'perilune[xgrammar]', or leave "
                "llguidance to compile grammars"
            )
        self._check_eps()
        for op, backend in self.ops.items():
            if not (isinstance(op, str) and isinstance(backend, str)):
                raise ConfigError(f"ops holds {op!r}: {backend!r}; it must map an op's name to a backend's name")

    def _check_state_cache(self, num_bytes: int) -> None:
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
            raise ConfigError(f"state_cache_bytes is {num_bytes!r}; it must be an integer of at least 0")
        if not self.prefix_cache:
            raise ConfigError(
                f"state_cache_bytes is {num_bytes} and prefix_cache is off, which keeps no states: give one of them"
            )

    def _check_drafting(self) -> None:
        if not isinstance(self.speculative, str) or not self.speculative:
            raise ConfigError(
                f"speculative is {self.speculative!r}; allowed are {OFF}, {NGRAM}, {DSPARK} and a draft's directory"
            )
        if self.num_drafts is not None and self.speculative == OFF:
            raise ConfigError(f"num_drafts is {self.num_drafts} and speculative is off: give both or neither")
        given: dict[str, object] = {
            "draft_rope_theta": self.draft_rope_theta,
            "draft_rope_interleaved": self.draft_rope_interleaved,
        }
        given["draft_rule"] = None if self.draft_rule == MATCHING else self.draft_rule
        for name, value in given.items():
            if value is not None and self.speculative in (OFF, NGRAM):
                raise ConfigError(
                    f"{name} is {value!r} and speculative is {self.speculative}, which has no draft "
                    "model: give a draft's directory, or leave it out"
                )
        if self.draft_rope_theta is not None and not 0 < self.draft_rope_theta < float("inf"):
            raise ConfigError(f"draft_rope_theta is {self.draft_rope_theta}; it must be a finite number above 0")

    def _check_tiers(self) -> None:
        num_bytes = self.host_cache_bytes
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
            raise ConfigError(f"host_cache_bytes is {num_bytes!r}; it must be an integer of at least 0")
        if self.kv_dir_bytes is not None and self.kv_dir is None:
            raise ConfigError(
                f"kv_dir_bytes is {self.kv_dir_bytes} and kv_dir names no directory: give both or neither"
            )
        if (num_bytes or self.kv_dir is not None) and not self.prefix_cache:
            name, value = ("host_cache_bytes", num_bytes) if num_bytes else ("kv_dir", str(self.kv_dir))
            raise ConfigError(f"{name} is {value!r} and prefix_cache is off, which keeps nothing: give one of them")

    def check_index_cache(self, model: ModelConfig) -> None:
        """ConfigError where `index_cache_dtype` asks for what this model's index keys cannot be."""
        if self.index_cache_dtype == AUTO:
            return
        given = f"index_cache_dtype is {self.index_cache_dtype!r}"
        if model.indexer is None:
            raise ConfigError(f"{given}, and this model keeps no index keys: leave it at {AUTO}")
        width = model.indexer.head_dim
        if self.index_cache_dtype == MXFP4 and width % MXFP4_GROUP:
            raise ConfigError(
                f"{given}, which needs a multiple of {MXFP4_GROUP} values, and this model's index keys have {width}: "
                f"use {FP8} or {INT8}"
            )

    def _check_eps(self) -> None:
        for part in fields(self.eps):
            value = getattr(self.eps, part.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ConfigError(f"eps.{part.name} is {value!r}; it must be a number above 0 and below 1")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
