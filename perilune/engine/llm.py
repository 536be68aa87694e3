"""Offline generation: the same engine core as behind the server, stepped by the caller's own thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.core import EngineCore
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprob
from perilune.errors import ConfigError
from perilune.sampling.params import SamplingParams
from perilune.text.channels import Channel, collect
from perilune.text.encoding import encode_chat
from perilune.text.images.reader import ImageReader
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

# What the cache holds may take so long to be written.
SAVING_S = 300.0

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One finished generation. `reasoning` is empty outside a chat; `token_ids` include the id that ended it."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int


class LLM:
    """A checkpoint ready to generate; without a path, the bundled demo. `options` are fields of EngineConfig.

    One thread at a time may use it.
    """

    def __init__(self, checkpoint: str | Path | None = None, **options: Any):
        known = [field.name for field in fields(EngineConfig)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}; known are {', '.join(known)}")
        path = DEMO_CHECKPOINT if checkpoint is None else Path(checkpoint)
        self._core = build_engine(path, EngineConfig(**options))
        self._num_requests = 0

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._core.tokenizer is not None
        return self._core.tokenizer

    def close(self) -> None:
        """Write what the cache holds to `kv_dir`, if there is one; the last call."""
        self._core.close(SAVING_S)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, *, progress: bool = False
    ) -> list[Completion]:
        """Continue prompts, given as text or token ids, in one batch; results come in the order of the prompts.

        In a text prompt the names of control tokens become their ids. RequestError and CapacityError are raised
        before anything runs; what fails later has `finish_reason` error.
        """
        params = params or SamplingParams()
        requests = [self._request(ids, params, Channel.TEXT) for ids in self._encode(prompts)]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        effort: str = "max",
        progress: bool = False,
    ) -> Completion:
        """Answer a conversation of `{"role": ..., "content": ...}` messages; `effort` counts only with `thinking`.

        A user's content may be a list of text and image_url parts, pictures as data: URLs.
        """
        media = self._core.limits.media
        images = None if media is None else ImageReader(media)
        prompt = encode_chat(messages, self.tokenizer, thinking=thinking, effort=effort, images=images)
        request = self._request(prompt.token_ids, params or SamplingParams(), prompt.start_channel)
        request = replace(request, images=prompt.load_images())
        return self._run([request], progress)[0]

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[Sequence[int]]:
        if isinstance(prompts, str):
            return [self.tokenizer.encode_markup(prompts)]
        ids = [prompt for prompt in prompts if isinstance(prompt, int)]
        if ids and len(ids) == len(prompts):
            return [ids]
        batch = [prompt for prompt in prompts if not isinstance(prompt, int)]
        assert len(batch) == len(prompts), "prompts mix token ids and whole prompts"
        return [self.tokenizer.encode_markup(prompt) if isinstance(prompt, str) else prompt for prompt in batch]

    def _request(self, token_ids: Sequence[int], params: SamplingParams, channel: Channel) -> GenerateRequest:
        self._num_requests += 1
        request = GenerateRequest(f"offline-{self._num_requests}", tuple(token_ids), params, channel)
        self._core.check(request)
        return request

    def _run(self, requests: Sequence[GenerateRequest], progress: bool) -> list[Completion]:
        """Step the core until all requests have ended; none is left behind if the caller interrupts it."""
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._core.add(request)
            with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
                while self._core.has_work:
                    for output in self._core.step():
                        outputs[output.request_id].append(output)
                        bar.update(output.is_finished)
        finally:
            for request_id in self._core.live_request_ids:
                self._core.abort(request_id)
        return [_completion(request, outputs[request.request_id], self.tokenizer) for request in requests]


def _completion(request: GenerateRequest, outputs: Sequence[RequestOutput], tokenizer: Tokenizer) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
    stream = TextStream(tokenizer, request.start_channel, request.params.stop)
    transcript = collect([*stream.push(token_ids), *stream.flush(last.finish_reason)])
    logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return Completion(
        text=transcript.content,
        reasoning=transcript.reasoning,
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=None if request.params.logprobs is None else logprobs,
        prompt_logprobs=outputs[0].prompt_logprobs,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
