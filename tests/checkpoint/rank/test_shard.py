import json
import struct
from collections import defaultdict

import pytest
import torch

from perilune.checkpoint.loader import load_state, map_tensors
from perilune.checkpoint.names import TEXT_PREFIX, layer_of, tensor_table
from perilune.checkpoint.random_init import random_tensors
from perilune.checkpoint.rank.shard import Shard, load_shard
from perilune.checkpoint.writer import write_checkpoint
from perilune.config.model import ModelConfig
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.errors import ConfigError
from perilune.parallel.mesh import Placement, Rank
from perilune.parallel.placement import Split, rule_of
from perilune.planner.precision import Precision, pieces

PLACEMENTS = [
    Placement(),
    Placement(tp=2),
    Placement(tp=4, ep=2),
    Placement(tp=4, ep=4),
    Placement(tp=2, ep=2),
    Placement(tp=2, pp=2),
    Placement(pp=3),
    Placement(dp=2, ep=2),
    Placement(dp=3),
    Placement(tp=2, dp=2, ep=2, pp=2),
]


@pytest.fixture(scope="module", params=["k3", "k31"])
def tiny(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    config = preset_config("tiny", request.param, has_vision=True, sizes={})
    write_checkpoint(directory, config, random_tensors(config, seed=3))
    return directory


def reassemble(directory, config: ModelConfig, placement: Placement):
    """Every tensor by stored name, put together from the parts of all ranks; what is whole must be equal everywhere."""
    parts = defaultdict(dict)
    for rank in placement.ranks():
        shard = load_shard(directory, config, placement, rank)
        for name, part in shard.items():
            parts[name][rank] = part
    found = {}
    for name, held in parts.items():
        rule = rule_of(stored_name(name))
        if rule.split is Split.REPLICATED:
            assert all(torch.equal(part, next(iter(held.values()))) for part in held.values()), name
            found[name] = next(iter(held.values()))
            continue
        ranks = placement.tp if rule.split is Split.TENSOR else placement.expert_tp
        by_place = {}
        for rank, part in held.items():
            by_place[rank.tp_rank if rule.split is Split.TENSOR else placement.expert_ranks(rank)[1]] = part
        found[name] = torch.cat([by_place[index] for index in range(ranks)], dim=rule.dim)
        if rule.split is Split.EXPERT:
            assert len(held) == ranks, name
    return found


def stored_name(name: str) -> str:
    return name.removeprefix("vision.") if name.startswith("vision.") else TEXT_PREFIX + name


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.label)
def test_the_parts_of_all_ranks_are_the_checkpoint_bit_for_bit(tiny, placement):
    config = load_model_config(tiny)
    whole = load_state(tiny, config)
    found = reassemble(tiny, config, placement)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", ["k3-tiny", "k31-tiny"])
@pytest.mark.parametrize("placement", PLACEMENTS[1:4], ids=lambda placement: placement.label)
def test_the_golden_checkpoints_too(goldens_dir, name, placement):
    directory = goldens_dir / name
    config = load_model_config(directory)
    whole, found = load_state(directory, config), reassemble(directory, config, placement)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in whole.items())


def num_bytes(shard) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in shard.values())


def planned_bytes(config, placement, rank):
    return sum(piece.bytes_on(placement, rank, config.num_hidden_layers) for piece in pieces(config, Precision()))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.label)
def test_each_rank_loads_the_bytes_that_the_planner_counts(tiny, placement):
    config = load_model_config(tiny)
    for rank in placement.ranks():
        assert num_bytes(load_shard(tiny, config, placement, rank)) == planned_bytes(config, placement, rank)


def hollow_checkpoint(directory, config: ModelConfig, *, without: str | None = None) -> None:
    """A checkpoint of zeros that takes no room on disk: headers over a file without blocks; some names left out."""
    directory.mkdir()
    header, position = {}, 0
    for name, family in tensor_table(config).released():
        if without is not None and name.endswith(without):
            continue
        end = position + family.tensor_bytes
        header[name] = {"dtype": family.dtypes[0], "shape": list(family.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(tp=4), Placement(tp=4, ep=4)], ids=lambda p: p.label)
def test_at_real_widths_each_rank_loads_what_the_planner_counts(tmp_path, placement):
    config = preset_config("k3-slice", "k3", has_vision=False, sizes={"num_experts": 16, "num_hidden_layers": 4})
    hollow_checkpoint(tmp_path / "slice", config)
    for rank in placement.ranks():
        loaded = num_bytes(load_shard(tmp_path / "slice", config, placement, rank))
        assert loaded == planned_bytes(config, placement, rank)


def test_experts_of_others_and_layers_of_other_stages_are_absent(tiny):
    config, placement = load_model_config(tiny), Placement(tp=2, ep=2, pp=2)
    shard = load_shard(tiny, config, placement, Rank(1, 0, 1))
    layers = {layer for name in shard if (layer := layer_of(stored_name(name))) is not None}
    assert layers == set(range(4, 8))
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in shard if ".experts." in name}
    assert experts == set(range(12, 24))
    assert "model.embed_tokens.weight" not in shard
    assert "lm_head.weight" in shard


def test_an_expert_of_96_is_cut_into_64_and_32(tiny):
    config, placement = load_model_config(tiny), Placement(tp=2)
    base = "model.layers.1.block_sparse_moe.experts.0."
    leaves = ("w1.weight_packed", "w2.weight_packed", "w2.weight_scale")
    shards = [load_shard(tiny, config, placement, rank) for rank in placement.ranks()]
    shapes = [{leaf: tuple(shard[base + leaf].shape) for leaf in leaves} for shard in shards]
    assert shapes == [
        {"w1.weight_packed": (64, 64), "w2.weight_packed": (128, 32), "w2.weight_scale": (128, 2)},
        {"w1.weight_packed": (32, 64), "w2.weight_packed": (128, 16), "w2.weight_scale": (128, 1)},
    ]


def test_rows_are_views_of_the_file_and_columns_are_copies(tiny):
    config = load_model_config(tiny)
    mapped = map_tensors(tiny, config, check_scales=False)
    shard = Shard(config, Placement(tp=2), Rank(0, 0, 1))
    for leaf, is_view in (("q_proj", True), ("o_proj", False)):
        name = f"language_model.model.layers.0.self_attn.{leaf}.weight"
        whole = mapped.state[name.removeprefix(TEXT_PREFIX)]
        part = shard.cut(mapped.families[name], whole)
        assert part.is_contiguous()
        assert (part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) is is_view


def test_an_absent_bias_comes_as_zeros_where_its_layer_is(tmp_path):
    config = preset_config("tiny", "k31", has_vision=False, sizes={})
    hollow_checkpoint(tmp_path / "no-bias", config, without="k_norm.bias")
    shards = [load_shard(tmp_path / "no-bias", config, Placement(pp=2), Rank(stage, 0, 0)) for stage in (0, 1)]
    found = [[layer_of(TEXT_PREFIX + name) for name in shard if name.endswith("k_norm.bias")] for shard in shards]
    assert found == [[layer for layer in config.full_attn_layers if layer // 4 == stage] for stage in (0, 1)]
    assert not any(shard[name].any() for shard in shards for name in shard if name.endswith("k_norm.bias"))


def test_a_placement_that_the_model_does_not_divide_by_is_refused(tiny):
    with pytest.raises(ConfigError, match="4 heads do not divide by tp 3"):
        load_shard(tiny, load_model_config(tiny), Placement(tp=3), Rank(0, 0, 0))
