"""What an engine can ever serve, told without the engine: the same answers in whichever process they are asked for."""

from dataclasses import dataclass

from perilune.config.media import MediaConfig
from perilune.engine.request import GenerateRequest, check_request
from perilune.errors import CapacityError, RequestError


@dataclass(frozen=True)
class CoreLimits:
    """What the core holds steps and requests to; `max_model_len` bounds prompt plus output.

    `media` says how pictures are prepared; None for a model that sees none. Steps with decodes are kept below
    `max_itl_s` seconds by giving them fewer prompt tokens, and prompts are cut at multiples of `prompt_grain` tokens.
    Without `has_priorities` all requests have the same. Whoever
    feeds the core lets at most `max_waiting` requests wait; None for any number.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    media: MediaConfig | None = None
    prompt_grain: int = 1
    max_itl_s: float | None = None
    has_priorities: bool = False
    max_waiting: int | None = None


@dataclass(frozen=True)
class RequestCheck:
    """Refuses what an engine with these limits, and a cache of `capacity_tokens`, can never serve."""

    limits: CoreLimits
    capacity_tokens: int
    has_tokenizer: bool

    def __call__(self, message: GenerateRequest) -> None:
        """Raise RequestError or CapacityError for what can never be served."""
        limits = self.limits
        check_request(message, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        if message.images and limits.media is None:
            raise RequestError("this model has no vision weights; send text only", param="messages", code="unsupported")
        if message.priority != 0 and not limits.has_priorities:
            raise RequestError(
                f"priority is {message.priority}, and this server has no priorities: leave it out, or start the server "
                "with --scheduling-policy priority",
                param="priority",
                code="unsupported",
            )
        if message.params.stop and not self.has_tokenizer:
            raise RequestError("stop strings need a tokenizer and this engine has none", param="stop")
        if message.grammar is not None and message.params.ignore_eos:
            raise RequestError(
                "ignore_eos is true, but a constrained answer ends where its grammar ends; leave it out",
                param="ignore_eos",
            )
        self._check_capacity(message)

    def max_total_tokens(self, message: GenerateRequest) -> int:
        """The most tokens that prompt and output may have together."""
        if message.params.max_tokens is None:
            return self.limits.max_model_len
        return min(self.limits.max_model_len, len(message.prompt_token_ids) + message.params.max_tokens)

    def _check_capacity(self, message: GenerateRequest) -> None:
        num_prompt_tokens, total = len(message.prompt_token_ids), self.max_total_tokens(message)
        room = self.capacity_tokens + 1
        if total > room:
            raise CapacityError(
                f"the request may grow to {total} tokens ({num_prompt_tokens} of them the prompt); the cache "
                f"holds {room}: shorten the prompt, set max_tokens to at most {max(0, room - num_prompt_tokens)}, or "
                "start with a larger cache"
            )
