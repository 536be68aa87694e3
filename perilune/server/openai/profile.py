"""Which sampling a server allows: `open` leaves it to the client, `kimi` is as strict as Moonshot's own service, and
`kvv` takes what Moonshot's verifier of vendors sends."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perilune.errors import RequestError

MAX_ANSWER_TOKENS = 131_072


@dataclass(frozen=True)
class Profile:
    """The only values that fields may have, and limits; a field that is not named may have any value.

    With `ends_failed_streams` a chat stream that fails when it has begun ends with an abnormal finish_reason, as
    Moonshot's does, instead of an error.
    """

    allowed: Mapping[str, tuple[float, ...]]
    can_turn_thinking_off: bool = True
    max_stop_strings: int | None = None
    max_stop_bytes: int | None = None
    max_tools: int | None = None
    default_max_tokens: int | None = None
    ends_failed_streams: bool = False


_FIXED: Mapping[str, tuple[float, ...]] = {"n": (1,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,)}
_SERVICE = Profile(
    {**_FIXED, "temperature": (1.0,), "top_p": (0.95,)},
    can_turn_thinking_off=False,
    max_stop_strings=5,
    max_stop_bytes=32,
    max_tools=128,
    default_max_tokens=MAX_ANSWER_TOKENS,
    ends_failed_streams=True,
)
PROFILES: Mapping[str, Profile] = {
    "open": Profile({}),
    "kimi": _SERVICE,
    "kvv": replace(
        _SERVICE,
        allowed={**_FIXED, "temperature": (0.0, 0.6, 1.0), "top_p": (0.95, 1.0)},
        can_turn_thinking_off=True,
    ),
}


def check_profile(request: Any, profile: Profile, *, is_thinking: bool) -> None:
    """Refuse what the profile does not allow in a chat or completion request, naming the field."""
    for name, values in profile.allowed.items():
        given = getattr(request, name)
        if given is not None and given not in values:
            allowed = f"only {values[0]:g} is" if len(values) == 1 else f"{', '.join(f'{v:g}' for v in values)} are"
            raise RequestError(f"invalid {name}: {allowed} allowed for this model, not {given:g}", param=name)
    if not is_thinking and not profile.can_turn_thinking_off:
        raise RequestError("invalid thinking: this model always thinks; it cannot be turned off", param="thinking")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if profile.max_stop_strings is not None and len(stop) > profile.max_stop_strings:
        raise RequestError(
            f"stop has {len(stop)} entries; at most {profile.max_stop_strings} are allowed", param="stop"
        )
    longest = max((len(text.encode(errors="surrogatepass")) for text in stop), default=0)
    if profile.max_stop_bytes is not None and longest > profile.max_stop_bytes:
        raise RequestError(
            f"stop holds a string of {longest} bytes; at most {profile.max_stop_bytes} are allowed", param="stop"
        )
    num_tools = len(getattr(request, "tools", None) or ())
    if profile.max_tools is not None and num_tools > profile.max_tools:
        raise RequestError(f"tools holds {num_tools} tools; at most {profile.max_tools} are allowed", param="tools")
