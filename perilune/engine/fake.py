"""An engine without a model: replays chosen tokens, for tests of whatever stands above the client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from perilune.engine.client import ModelInfo
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprob, check_request
from perilune.engine.stats import EngineStats
from perilune.errors import RequestError

Script = Callable[[GenerateRequest], Sequence[int] | Sequence[RequestOutput]]

FAKE_LOGPROB = -0.5


class FakeEngine:
    """Answers each request with what `script` returns for it: token ids, or complete outputs that are sent as they are.

    Token ids come one per output, `delay_s` apart, and end at a stop id (reason stop) or at the end of the script or
    `max_tokens` (reason length). Requested log-probabilities are `FAKE_LOGPROB`. A script may raise: then so does
    `generate`. `requests` lists everything asked, `num_aborts` counts streams ended before their last output.
    """

    def __init__(self, model: ModelInfo, script: Script, *, delay_s: float = 0.0):
        self.model = model
        self.requests: list[GenerateRequest] = []
        self.num_aborts = 0
        self.failure: str | None = "the engine is not started"
        self._script = script
        self._delay_s = delay_s
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._num_finished = dict.fromkeys(FinishReason, 0)

    def start(self) -> None:
        self.failure = None

    def stop(self, timeout_s: float) -> None:
        self.failure = "the engine is stopped"
        self._aborted |= self._running

    def check_health(self) -> str | None:
        return self.failure

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._aborted.add(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            slots_used=len(self._running),
            slots_total=16,
            blocks_used=len(self._running),
            blocks_total=64,
            prompt_tokens_total=sum(len(request.prompt_token_ids) for request in self.requests),
            finished_total=dict(self._num_finished),
        )

    async def inspect(self) -> dict[str, Any]:
        return {"usage": {"blocks_used": len(self._running)}, "requests": [{"id": name} for name in self._running]}

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.failure is not None:
            raise RequestError(self.failure, status=503, code="engine_unavailable")
        check_request(request, vocab_size=self.model.vocab_size, max_model_len=self.model.max_model_len)
        script = self._script(request)
        outputs = [item for item in script if isinstance(item, RequestOutput)]
        if not outputs:
            outputs = self._outputs(request, [item for item in script if isinstance(item, int)])
        return self._replay(request, outputs)

    async def _replay(
        self, request: GenerateRequest, outputs: Sequence[RequestOutput]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self._running.add(request.request_id)
        reason = FinishReason.ABORT
        try:
            for output in outputs:
                await asyncio.sleep(self._delay_s)
                if request.request_id in self._aborted:
                    output = _aborted(output)
                if output.finish_reason is not None:
                    reason = output.finish_reason
                    self._running.discard(request.request_id)
                yield output
                if output.is_finished:
                    return
        finally:
            self._running.discard(request.request_id)
            self._aborted.discard(request.request_id)
            self._num_finished[reason] += 1
            self.num_aborts += reason is FinishReason.ABORT

    def _outputs(self, request: GenerateRequest, token_ids: Sequence[int]) -> list[RequestOutput]:
        params = request.params
        room = self.model.max_model_len - len(request.prompt_token_ids)
        token_ids = token_ids[: room if params.max_tokens is None else min(room, params.max_tokens)]
        assert token_ids, "a script must hold at least one token"
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids)}
        outputs = []
        for index, token_id in enumerate(token_ids):
            is_stop = token_id in stop_ids
            is_last = is_stop or index == len(token_ids) - 1
            length_or_none = FinishReason.LENGTH if is_last else None
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=(token_id,),
                    logprobs=None if params.logprobs is None else (_logprob(token_id, params.logprobs),),
                    prompt_logprobs=_prompt_logprobs(request) if index == 0 else None,
                    finish_reason=FinishReason.STOP if is_stop else length_or_none,
                    stop_reason=token_id if is_stop and token_id in params.stop_token_ids else None,
                    error=None,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=0,
                    num_output_tokens=index + 1,
                )
            )
            if is_stop:
                break
        return outputs


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((token_id + offset, FAKE_LOGPROB - offset) for offset in range(num_top))
    return TokenLogprob(token_id, FAKE_LOGPROB, 1, top)


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return (None, *(_logprob(token_id, num_top) for token_id in request.prompt_token_ids[1:]))


def _aborted(output: RequestOutput) -> RequestOutput:
    return replace(
        output,
        token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=FinishReason.ABORT,
        stop_reason=None,
        num_output_tokens=output.num_output_tokens - len(output.token_ids),
    )
