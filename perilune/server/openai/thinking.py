"""Which thinking a chat request asks for, in any of the three ways that clients ask for it."""

from dataclasses import dataclass

from perilune.errors import RequestError
from perilune.server.openai.schema import AsksForChat
from perilune.server.openai.validate import check_word

# what the model knows, and the words of other APIs for the nearest of it
EFFORTS = {"low": "low", "high": "high", "max": "max", "minimal": "low", "medium": "high", "xhigh": "max"}
OFF = "none"
DEFAULT_EFFORT = "max"


@dataclass(frozen=True)
class ThinkingMode:
    """Whether the model thinks before it answers, and with which of its own efforts."""

    is_on: bool
    effort: str


def thinking_mode(request: AsksForChat) -> ThinkingMode:
    """On with effort max unless the request says otherwise; RequestError where it contradicts itself.

    An effort inside `thinking` counts before one in `chat_template_kwargs`, and that before `reasoning_effort`.
    """
    _check_history(request)
    efforts = _efforts(request)
    switches = _switches(request)
    if len(set(switches.values())) > 1:
        said = ", ".join(f"{name} says {'on' if is_on else 'off'}" for name, is_on in switches.items())
        raise RequestError(f"the request contradicts itself about thinking: {said}", param=next(iter(switches)))
    effort = next((effort for effort in efforts.values() if effort != OFF), DEFAULT_EFFORT)
    return ThinkingMode(next(iter(switches.values()), True), EFFORTS[effort])


def _efforts(request: AsksForChat) -> dict[str, str]:
    thinking, options = request.thinking, request.chat_template_kwargs
    given = {
        "thinking.effort": thinking.effort if thinking else None,
        "chat_template_kwargs.thinking_effort": options.thinking_effort if options else None,
        "reasoning_effort": request.reasoning_effort,
    }
    efforts = {name: effort for name, effort in given.items() if effort is not None}
    for name, effort in efforts.items():
        check_word(effort, (*EFFORTS, OFF), name)
    return efforts


def _switches(request: AsksForChat) -> dict[str, bool]:
    """Every field that turns thinking on or off, with what it says."""
    switches: dict[str, bool] = {}
    if request.thinking is not None and request.thinking.type is not None:
        check_word(request.thinking.type, ("enabled", "disabled"), "thinking.type")
        switches["thinking.type"] = request.thinking.type == "enabled"
    if options := request.chat_template_kwargs:
        for name in ("thinking", "enable_thinking"):
            if (is_on := getattr(options, name)) is not None:
                switches[f"chat_template_kwargs.{name}"] = is_on
    switches |= {name: False for name, effort in _efforts(request).items() if effort == OFF}
    return switches


def _check_history(request: AsksForChat) -> None:
    """The model was trained with all earlier reasoning in its prompt, so it cannot be left out."""
    if request.thinking is not None and request.thinking.keep not in (None, "all"):
        check_word(request.thinking.keep, ("all",), "thinking.keep")
    options = request.chat_template_kwargs
    if options is not None and options.preserve_thinking is False:
        raise RequestError(
            "chat_template_kwargs.preserve_thinking is false; only true is supported: this model needs its earlier "
            "reasoning in the prompt",
            param="chat_template_kwargs.preserve_thinking",
        )
