"""What this machine can do at most, measured by the native core before every benchmark, and what work is bound by."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from perilune.bench.spread import Spread
from perilune.ops._native import TYPE_CODES, core

# far more than any last-level cache, and read in a few hundredths of a second
READ_BYTES = 512 << 20
# sequential streams that one thread reads in turns; the best number differs between processors
STREAMS = (1, 2, 3, 4)
_PASSES = 7
_DOT_S = 0.3

Products = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class Ceilings:
    """Rates of all threads together, per second, under the instruction set in use.

    `read_by_streams`: bytes read from memory by number of streams per thread. Multiplications and additions count as
    one operation each; a rate is 0 where the instruction set has no such product.
    """

    isa: str
    num_threads: int
    read_by_streams: dict[int, Spread]
    float32_flops: float
    bfloat16_flops: float
    int8_ops: float

    @property
    def read(self) -> float:
        """Bytes per second: the median of the best number of streams."""
        return max(spread.median for spread in self.read_by_streams.values())

    @property
    def best_streams(self) -> int:
        return max(self.read_by_streams, key=lambda streams: self.read_by_streams[streams].median)

    def read_again(self) -> list[float]:
        """Bytes per second of passes just now, by the best number of streams."""
        return read_rates(self.best_streams)

    def with_reads(self, reads: Spread) -> "Ceilings":
        """Reads by the best number of streams from another time: the rate of a shared machine wanders."""
        return replace(self, read_by_streams={self.best_streams: reads})

    def with_read_measured_again(self) -> "Ceilings":
        """Reads of just now."""
        return self.with_reads(Spread.of(self.read_again()))

    def flops(self, products: Products) -> float:
        """The rate of products of these; a processor without an instruction for them widens them to float32."""
        own = {"float32": 0.0, "bfloat16": self.bfloat16_flops, "int8": self.int8_ops}[products]
        return own or self.float32_flops

    def as_json(self) -> dict[str, Any]:
        return {
            "isa": self.isa,
            "threads": self.num_threads,
            "read": self.read,
            "read_by_streams": {
                str(streams): {"median": spread.median, "low": spread.low, "high": spread.high}
                for streams, spread in self.read_by_streams.items()
            },
            "float32_flops": self.float32_flops,
            "bfloat16_flops": self.bfloat16_flops,
            "int8_ops": self.int8_ops,
        }

    def __str__(self) -> str:
        read = ", ".join(
            f"{streams} {spread.median / 1e9:.1f} ({spread.low / 1e9:.1f}-{spread.high / 1e9:.1f})"
            for streams, spread in self.read_by_streams.items()
        )
        rates = {"float32": self.float32_flops, "bfloat16": self.bfloat16_flops, "int8": self.int8_ops}
        shown = ", ".join(f"{name} {f'{rate / 1e9:.0f}' if rate else 'none'}" for name, rate in rates.items())
        return (
            f"{self.isa}, {self.num_threads} thread(s)\n"
            f"reads, GB/s by streams per thread: {read}\n"
            f"products in registers, GFLOP/s: {shown}"
        )


@dataclass(frozen=True)
class Work:
    """What a call must do at least: bytes that it reads from memory, and operations on products of one kind."""

    read_bytes: float
    flops: float
    products: Products = "bfloat16"

    def ideal_s(self, ceilings: Ceilings) -> dict[str, float]:
        """The seconds that each bound alone allows."""
        return {"memory": self.read_bytes / ceilings.read, "arithmetic": self.flops / ceilings.flops(self.products)}


def read_rates(streams: int) -> list[float]:
    """Bytes per second of all threads together, pass by pass; BackendError without a native core."""
    return list(core().read_rates(READ_BYTES, streams, _PASSES))


def measure_ceilings() -> Ceilings:
    """Takes about two seconds; BackendError without a native core."""
    native = core()
    read_by_streams = {streams: Spread.of(read_rates(streams)) for streams in STREAMS}
    codes = (TYPE_CODES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.int8))
    return Ceilings(
        native.isa(), native.num_threads(), read_by_streams, *(native.dot_rate(code, _DOT_S) for code in codes)
    )
