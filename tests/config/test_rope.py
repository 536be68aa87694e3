from itertools import pairwise
from math import log

import pytest

from perilune.config.rope import RopeConfig


def yarn(**values):
    given = {"width": 64, "theta": 10000.0, "is_interleaved": False, "factor": 8.0}
    return RopeConfig(**{**given, "original_max_position_embeddings": 4096, **values})


def test_fast_pairs_turn_as_before_and_slow_ones_by_the_factor_less():
    rope = yarn()
    plain = RopeConfig(64, 10000.0, False).frequencies
    assert rope.frequencies[0] == plain[0] == 1.0
    # a pair that turns more than 32 times within 4096 positions keeps its speed, one that turns less than once does not
    turns = [4096 * frequency / 6.283185307179586 for frequency in plain]
    kept = [pair for pair, count in enumerate(turns) if count > 32]
    slowed = [pair for pair, count in enumerate(turns) if count < 1]
    assert kept
    assert slowed
    assert all(rope.frequencies[pair] == plain[pair] for pair in kept)
    assert all(rope.frequencies[pair] == pytest.approx(plain[pair] / 8) for pair in slowed)


def test_between_them_speeds_fall_without_a_jump():
    frequencies = yarn().frequencies
    assert all(a > b for a, b in pairwise(frequencies))


def test_both_places_of_mscale():
    rope = yarn(mscale=1.0, mscale_all_dim=0.707)
    one, other = 0.1 * log(8) + 1, 0.0707 * log(8) + 1
    assert rope.table_factor == pytest.approx(one / other)
    assert rope.latent_score_factor == pytest.approx(other**2)
    assert yarn().table_factor == pytest.approx(one)
    assert yarn().latent_score_factor == 1.0


def test_plain_rope_has_no_factors():
    rope = RopeConfig(4, 100.0, True)
    assert rope.frequencies == (1.0, 0.1)
    assert (rope.table_factor, rope.latent_score_factor) == (1.0, 1.0)
