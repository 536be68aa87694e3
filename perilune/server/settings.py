"""What a server is told at start: its key and its limits. Knows no engine."""

from dataclasses import dataclass, fields

from perilune.errors import ConfigError
from perilune.server.openai.profile import PROFILES

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server; a wrong value raises ConfigError.

    `api_key` None serves without a key. `max_choices` bounds prompts times `n` of one request,
    `max_picture_bytes` the decoded pictures of all that wait or run. At shutdown, answers in
    progress may take `drain_timeout_s` seconds before they are cut. `allow_image_urls` lets requests name pictures on
    the public internet, which the server then fetches. A request may take `request_timeout_s` seconds unless it asks
    for less; None for any time. `profile` says which sampling is allowed (openai/profile.py).
    `has_debug_routes` adds routes that show what the engine holds, and for whom.
    """

    api_key: str | None = None
    max_body_bytes: int = 32 * MEBIBYTE
    max_messages: int = 4096
    max_choices: int = 128
    max_picture_bytes: int = 2048 * MEBIBYTE
    drain_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    allow_image_urls: bool = False
    profile: str = "open"
    has_debug_routes: bool = False

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is blank; give it a key, or leave it out to serve without one")
        if self.profile not in PROFILES:
            raise ConfigError(f"profile is {self.profile!r}; allowed are {', '.join(PROFILES)}")
        if self.request_timeout_s is not None and not 0 < self.request_timeout_s < float("inf"):
            raise ConfigError(f"request_timeout_s is {self.request_timeout_s}; it must be a number of seconds above 0")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "drain_timeout_s":
                if not 0 <= value <= 3600:
                    raise ConfigError(f"drain_timeout_s is {value}; it must be 0 to 3600 seconds")
            elif setting.name.startswith("max_") and value < 1:
                raise ConfigError(f"{setting.name} is {value}; it must be at least 1")
