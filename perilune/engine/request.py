"""A request: the messages that cross the client, and the mutable record that the scheduler keeps.

Knows token ids and counts; no tensors, no text, no transport.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from perilune.cache.chain import ContentSpan, PrefixChain
from perilune.errors import RequestError
from perilune.grammar.matcher import GrammarState
from perilune.grammar.spec import Grammar
from perilune.sampling.logprobs import TokenLogprob as TokenLogprob
from perilune.sampling.params import SamplingParams
from perilune.text.channels import Channel
from perilune.text.images.picture import ImageInput as ImageInput


class FinishReason(StrEnum):
    """Why a request ended; the value is the word shown to clients."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class RequestStatus(Enum):
    """Where a request stands between two steps."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to continue.

    `start_channel` is the channel that the first generated token belongs to, so that stop strings match response
    text only; `Channel.TEXT` is plain text without channels. `images` lie in the prompt in their order. `grammar` is
    what the generated tokens must obey. A request of lower `priority` goes first. `timeout_s` seconds after its
    arrival a request ends, wherever it stands. Log lines about it carry `log_id`. Prefixes are shared only among
    requests of equal `cache_salt`. `branch_points` are numbers of prompt tokens behind which other requests are likely
    to go on differently.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    start_channel: Channel = Channel.TEXT
    images: tuple[ImageInput, ...] = ()
    grammar: Grammar | None = None
    priority: int = 0
    log_id: str | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    branch_points: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """News about one request after one step.

    `token_ids` are the new ones only, and include the stop token that ended the request. `prompt_logprobs` comes with
    the first output only: one entry per prompt token, None for the first. The output with a `finish_reason` is the
    last one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """The scheduler's record of one live request.

    `arrival_index` orders requests of one priority for admission and preemption; `max_total_tokens` bounds prompt plus
    output. `num_overtaken` counts the later requests that were admitted before this one.
    `token_ids` are prompt and output. `prompt_logprobs[i]` belongs to prompt token i, and grows as the prompt is
    computed. `seed` is the one asked for, or one drawn for this request. `grammar` has taken every token that was
    generated, and stays as it is when the request is preempted. `num_cached_tokens` were there when it was first
    admitted. The state is to be copied at `seal_positions`, as far as they are ahead. `may_load` is False after a
    failed load. Times are readings of the engine's clock, in seconds.
    """

    message: GenerateRequest
    arrival_index: int
    arrival_s: float
    max_total_tokens: int
    seed: int
    grammar: GrammarState | None = None
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_overtaken: int = 0
    seal_positions: tuple[int, ...] = ()
    may_load: bool = True
    first_scheduled_s: float | None = None
    last_token_s: float | None = None
    _chain: PrefixChain | None = None

    def __post_init__(self) -> None:
        self.token_ids.extend(self.message.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def params(self) -> SamplingParams:
        return self.message.params

    def prefix_chain(self, block_size: int) -> PrefixChain:
        """The names of this request's beginnings, in blocks of `block_size` tokens."""
        if self._chain is None:
            spans = [ContentSpan(image.start, image.end, image.digest) for image in self.message.images]
            self._chain = PrefixChain(self.token_ids, block_size, self.message.cache_salt, spans)
        return self._chain

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that the model has not seen; 1 for a request that is decoding."""
        return self.num_tokens - self.num_computed_tokens


def check_request(message: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError for a prompt or parameters that this model can never serve."""
    num_prompt_tokens = len(message.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty; it must hold at least one token", param="prompt")
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens; the context is {max_model_len} tokens and one must be left "
            f"for the answer: shorten the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    _check_ids("prompt", message.prompt_token_ids, vocab_size)
    _check_ids("stop_token_ids", message.params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", message.params.logit_bias, vocab_size)


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}; this model's ids are 0 to {vocab_size - 1}", param=param
            )
