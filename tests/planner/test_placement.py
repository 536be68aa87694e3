from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.checkpoint.names import VISION_PARTS
from perilune.models.accounting import account
from perilune.parallel.mesh import Placement, Rank
from perilune.parallel.placement import Home, Split
from perilune.planner.placement import Piece
from perilune.planner.precision import DENSE, EXPERTS, Precision, pieces

SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 2), (5, 1)])


def total_over_ranks(piece, placement, num_layers):
    return sum(piece.bytes_on(placement, rank, num_layers) for rank in placement.ranks())


@settings(deadline=None, max_examples=30)
@given(
    shape=SHAPES,
    pp=st.integers(1, 9),
    splits_experts=st.booleans(),
    experts=st.sampled_from(EXPERTS),
    dense=st.sampled_from(DENSE),
    shards=st.booleans(),
)
def test_bytes_of_all_ranks_sum_to_the_parts(small, shape, pp, splits_experts, experts, dense, shards):
    tp, dp = shape
    placement = Placement(tp=tp, pp=pp, dp=dp, ep=tp * dp if splits_experts else 1)
    for piece in pieces(small, Precision(experts, dense), shards_everything=shards):
        copies = piece.copies(placement)
        assert total_over_ranks(piece, placement, small.num_hidden_layers) == copies * piece.total_bytes


def test_as_released_the_pieces_are_the_account(k31):
    found = Counter()
    for piece in pieces(k31, Precision()):
        found[piece.part] += piece.total_bytes
    assert found == {part: row.bytes for part, row in account(k31).parts.items()}


def test_without_vision_only_vision_is_missing(k3):
    parts = {piece.part for piece in pieces(k3, Precision(), has_vision=False)}
    assert parts == set(account(k3).parts) - VISION_PARTS


@given(shape=SHAPES, pp=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_no_rank_of_a_stage_holds_more_than_its_first(small, shape, pp):
    placement = Placement(tp=shape[0], pp=pp, dp=shape[1], ep=shape[0] * shape[1])
    sizes = {
        rank: sum(piece.bytes_on(placement, rank, small.num_hidden_layers) for piece in pieces(small, Precision()))
        for rank in placement.ranks()
    }
    assert all(size <= sizes[Rank(rank.stage, 0, 0)] for rank, size in sizes.items())


def test_a_piece_lies_where_its_home_says():
    placement = Placement(pp=2)
    first = Piece(None, Split.TENSOR, Home.FIRST, 4, 1, (0,))
    last = replace(first, home=Home.LAST)
    layered = replace(first, home=Home.LAYERS, layers=(0, 3))
    on = [[piece.bytes_on(placement, Rank(stage, 0, 0), 4) for stage in (0, 1)] for piece in (first, last, layered)]
    assert on == [[4, 0], [0, 4], [4, 4]]


def test_experts_are_split_by_group_and_then_by_width():
    piece = Piece(None, Split.EXPERT, Home.LAYERS, 8, 10, (0,), num_experts=6)
    placement = Placement(tp=2, dp=2, ep=2)
    assert placement.expert_tp == 2
    assert [piece.bytes_on(placement, rank, 1) for rank in placement.ranks()] == [3 * 4 * 10] * 4


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (Placement(tp=5), "96 heads do not divide by tp 5"),
        (Placement(tp=3, ep=3), "896 experts do not divide by ep 3"),
        (Placement(tp=8, dp=16), "96 scale groups of an expert's inner width are fewer than 128 ranks"),
        (Placement(tp=8, dcp=16), "dcp 16 does not divide tp 8"),
        (Placement(pp=94), "93 layers are fewer than 94 stages"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_number(k3, placement, reason):
    assert reason in placement.refusal(k3)


def test_labels_name_the_sizes_above_one():
    assert Placement(tp=16, dp=4, ep=64).label == "dp4 tp16 ep64"
    assert Placement(tp=8, dcp=8).label == "tp8 dcp8"
    assert Placement().label == "one device"
