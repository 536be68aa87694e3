from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.checkpoint.names import tensor_table
from perilune.config.presets import preset_config
from perilune.parallel.mesh import Placement, Rank, share
from perilune.parallel.placement import EXPERT_INPUTS, RULES, Home, Split, num_units, rule_of


@pytest.mark.parametrize("arch", ["k3", "k31"])
def test_every_tensor_meets_one_row(released_configs, arch):
    for family in tensor_table(released_configs[arch]).families:
        assert sum(fnmatchcase(family.pattern, row) for row, _ in RULES) == 1, family.pattern


def test_every_row_has_a_tensor(released_configs):
    patterns = [family.pattern for family in tensor_table(released_configs["k31"]).families]
    assert [row for row, _ in RULES if not any(fnmatchcase(pattern, row) for pattern in patterns)] == []


def test_a_name_meets_the_row_of_its_family():
    for family in tensor_table(preset_config("tiny", "k31", has_vision=True, sizes={})).families:
        assert {rule_of(name) for name in family.names()} == {rule_of(family.pattern)}


@pytest.mark.parametrize("name", ["language_model.model.layers.0.self_attn.new_proj.weight", "model.norm.weight"])
def test_a_name_without_a_row_is_refused(name):
    with pytest.raises(AssertionError, match="meets 0 rows"):
        rule_of(name)


def test_what_is_held_where():
    layer = "language_model.model.layers.{layer}."
    expected = {
        layer + "self_attn.o_proj.weight": (Split.TENSOR, 1, Home.LAYERS),
        layer + "self_attn.q_proj.weight": (Split.TENSOR, 0, Home.LAYERS),
        layer + "self_attn.kv_a_layernorm.weight": (Split.REPLICATED, None, Home.LAYERS),
        layer + "block_sparse_moe.routed_expert_norm.weight": (Split.REPLICATED, None, Home.LAYERS),
        layer + "block_sparse_moe.experts.{expert}.w2.weight_scale": (Split.EXPERT, 1, Home.LAYERS),
        layer + "block_sparse_moe.experts.{expert}.w1.weight_packed": (Split.EXPERT, 0, Home.LAYERS),
        "language_model.model.embed_tokens.weight": (Split.TENSOR, 0, Home.FIRST),
        "language_model.lm_head.weight": (Split.TENSOR, 0, Home.LAST),
    }
    for name, (split, dim, home) in expected.items():
        rule = rule_of(name)
        assert (rule.split, rule.dim, rule.home) == (split, dim, home), name


def test_experts_are_cut_at_scale_groups_unevenly_where_they_must():
    units = num_units(EXPERT_INPUTS, (128, 48), 96)  # packed: two values a byte
    assert units == 3
    assert [32 * len(share(units, 2, rank)) for rank in range(2)] == [64, 32]


@given(num_units=st.integers(0, 200), num_ranks=st.integers(1, 17))
def test_shares_follow_each_other_and_cover_everything(num_units, num_ranks):
    shares = [share(num_units, num_ranks, rank) for rank in range(num_ranks)]
    assert [unit for own in shares for unit in own] == list(range(num_units))
    sizes = [len(own) for own in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_ranks_of_one_expert_group_follow_each_other():
    placement = Placement(tp=2, dp=2, ep=2)
    assert [placement.expert_ranks(rank) for rank in placement.ranks()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Placement(tp=4, ep=4).expert_ranks(Rank(0, 0, 3)) == (3, 0)
