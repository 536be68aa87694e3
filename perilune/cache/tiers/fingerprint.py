"""Whose objects these are: a digest of everything that bytes under the same key could differ by."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from perilune.cache.tiers.object_file import FINGERPRINT_BYTES

Setting = str | int | float | bool | None | list["Setting"] | dict[str, "Setting"]


@dataclass(frozen=True)
class Fingerprint:
    """The model and settings that objects were computed with; `text` is JSON for people, `digest` is for machines."""

    text: str

    @property
    def digest(self) -> bytes:
        return blake2b(self.text.encode(), digest_size=FINGERPRINT_BYTES).digest()


def fingerprint(settings: Mapping[str, Setting]) -> Fingerprint:
    """The fingerprint of `settings`, whatever their order."""
    return Fingerprint(json.dumps(settings, sort_keys=True, indent=1, ensure_ascii=False))
