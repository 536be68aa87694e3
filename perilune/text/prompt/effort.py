"""How much the model is told to think."""

from perilune.errors import RequestError
from perilune.text.prompt.segments import Segment, system_message

THINKING_EFFORTS = ("low", "high", "max")

# The text promises `medium`, which the model was not trained with.
_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)


def thinking_effort(effort: str) -> list[Segment]:
    """The message that tells the model how much to think."""
    if effort not in THINKING_EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort!r}; allowed are {', '.join(THINKING_EFFORTS)}, and none for no thinking",
            param="reasoning_effort",
        )
    return system_message("thinking-effort", _BODY.format(effort=effort))
