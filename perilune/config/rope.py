"""Rotary positions of a draft model: plain or YaRN (Peng et al. 2023), as frequencies and two factors. No torch."""

from dataclasses import dataclass
from math import ceil, floor, log, pi

from perilune.config.section import Section


@dataclass(frozen=True)
class RopeConfig:
    """How `width` channels of a head turn with the position; `factor` 1 is plain RoPE.

    `is_interleaved` turns the channels (0, 1), (2, 3), ...; else (i, i + width / 2).
    """

    width: int
    theta: float
    is_interleaved: bool
    factor: float = 1.0
    original_max_position_embeddings: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each of the width / 2 pairs."""
        pairs = range(self.width // 2)
        fast = [self.theta ** (-2 * pair / self.width) for pair in pairs]
        if self.factor == 1.0:
            return tuple(fast)
        low = max(floor(self._pair_of(self.beta_fast)), 0)
        high = min(ceil(self._pair_of(self.beta_slow)), self.width - 1)
        span = max(high - low, 0.001)
        shares = [min(max((pair - low) / span, 0.0), 1.0) for pair in pairs]
        return tuple(own * (share / self.factor + 1.0 - share) for own, share in zip(fast, shares, strict=True))

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def latent_score_factor(self) -> float:
        """What the softmax scale of latent attention is multiplied by besides."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _pair_of(self, rotations: float) -> float:
        """The pair that turns `rotations` times within the original context."""
        turns = self.original_max_position_embeddings / (rotations * 2 * pi)
        return self.width * log(turns) / (2 * log(self.theta))

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * log(self.factor) + 1.0


def parse_rope(top: Section, width: int, *, is_interleaved: bool, theta: float | None) -> RopeConfig:
    """Reads `rope_parameters` (or its older name `rope_scaling`), whose theta wins over `rope_theta` beside it.

    `theta` overrides both.
    """
    top.skip("rope_theta")
    given = [key for key in ("rope_parameters", "rope_scaling") if top.get(key, None) is not None]
    if len(given) > 1:
        top.refuse("rope_scaling", top.get("rope_scaling"), "absent where rope_parameters is given")
    if not given:
        return RopeConfig(width, theta or top.positive("rope_theta"), is_interleaved)
    rope = top.section(given[0])
    kind = "rope_type" if "rope_type" in rope else "type"
    rope.fixed(kind, "yarn", "default")
    own_theta = (rope if "rope_theta" in rope else top).positive("rope_theta")
    if rope.get(kind) == "default":
        rope.finish()
        return RopeConfig(width, theta or own_theta, is_interleaved)
    rope.fixed("truncate", True, optional=True)
    if rope.positive("factor") < 1:
        rope.refuse("factor", rope.get("factor"), "a number of at least 1")
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    config = RopeConfig(
        width,
        theta or own_theta,
        is_interleaved,
        factor=rope.positive("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        **{key: rope.number(key) for key in optional if key in rope},
    )
    rope.finish()
    return config
