"""Byte quantities with their unit as a type: GB is 10^9 bytes, GiB is 2^30, and the two never add or compare.

Arithmetic is done in whole bytes (`..._bytes`); these types stand where a person wrote or reads a quantity.
"""

import re
from dataclasses import dataclass

from perilune.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) (GB|GiB|MiB)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) (GB/s|TB/s|TFLOP/s)")
_RATE_UNITS = {"GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12}


@dataclass(frozen=True, order=True)
class GB:
    """A quantity in decimal gigabytes."""

    value: float

    @classmethod
    def of(cls, num_bytes: float) -> "GB":
        return cls(num_bytes / 10**9)

    @property
    def num_bytes(self) -> int:
        return round(self.value * 10**9)

    def __str__(self) -> str:
        return f"{self.value:,.2f} GB"


@dataclass(frozen=True, order=True)
class GiB:
    """A quantity in binary gigabytes."""

    value: float

    @classmethod
    def of(cls, num_bytes: float) -> "GiB":
        return cls(num_bytes / 2**30)

    @property
    def num_bytes(self) -> int:
        return round(self.value * 2**30)

    def __str__(self) -> str:
        return f"{self.value:,.2f} GiB"


def parse_size(text: str) -> GB | GiB:
    """Reads "288 GB", "287.98 GiB" or "97887 MiB"; ConfigError for a number without one of these units."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"size {text!r} is not understood; allowed: a number, a space, and GB, GiB or MiB")
    value, unit = float(match[1]), match[2]
    if unit == "GB":
        return GB(value)
    return GiB(value if unit == "GiB" else value / 1024)


def parse_rate(text: str) -> float:
    """Reads "8 TB/s", "256 GB/s" or "2500 TFLOP/s" as bytes or operations per second."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"rate {text!r} is not understood; allowed: a number, a space, and {', '.join(_RATE_UNITS)}")
    return float(match[1]) * _RATE_UNITS[match[2]]
