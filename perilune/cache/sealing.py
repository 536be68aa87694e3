"""Where on its way through a prompt a request's state is worth a copy."""

from collections.abc import Sequence
from dataclasses import dataclass

# A copy this near to the end of a prompt saves what one there would.
NEAR = 64


@dataclass(frozen=True)
class SealPolicy:
    """`interval` tokens lie between the states kept of a long prompt; every position is a multiple of `grain`."""

    interval: int
    grain: int = 1

    def positions(self, first: int, num_row_tokens: int, num_tokens: int, hints: Sequence[int]) -> tuple[int, ...]:
        """Positions in a prompt of `num_tokens` tokens, of which the first `first` are not computed again; ascending.

        Those are: every `interval` tokens; the `hints`; where an earlier request's rows end (`num_row_tokens`) and no
        state was there to take them up, which is where this request branches off; and the last position that the same
        prompt can take up when it comes again, unless another is near.
        """
        last = (num_tokens - 1) // self.grain * self.grain
        wanted = (*range(self.interval, num_tokens, self.interval), *hints, num_row_tokens)
        aligned = {position // self.grain * self.grain for position in wanted}
        found = {position for position in aligned if first < position <= last}
        if last > max(found, default=first) + NEAR or (last > first and not found):
            found.add(last)
        return tuple(sorted(found))
