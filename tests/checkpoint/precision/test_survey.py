"""The survey of a checkpoint, against each matrix taken whole."""

import dataclasses

from perilune.checkpoint.loader import load_state
from perilune.checkpoint.names import parameter_name
from perilune.checkpoint.precision import survey as module
from perilune.checkpoint.precision.exactness import FORMATS, REGIONS, bits_lost, extent_of_mxfp4, extent_of_values
from perilune.config.parse import load_model_config


def test_matrices_read_in_pieces_get_the_answer_of_the_whole(micro_checkpoint, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_VALUES", 1)
    config = load_model_config(micro_checkpoint)
    state, found = load_state(micro_checkpoint, config), list(module.survey(micro_checkpoint, config))
    assert max(state[parameter_name(tensor.name)].shape[0] for tensor in found) > module.BLOCK_SIZE
    for tensor in found:
        weight = state[parameter_name(tensor.name)].flatten(1)
        if tensor.stored == "mxfp4":
            scale = state[parameter_name(tensor.name.replace("weight_packed", "weight_scale"))]
            extent = extent_of_mxfp4(weight, scale)
            exponents = scale.int() - 127
            assert tensor.exponents == (int(exponents.min()), int(exponents.max()))
            assert tensor.row_spread == int((exponents.amax(1) - exponents.amin(1)).max())
        else:
            extent = extent_of_values(weight)
        for region in REGIONS:
            for name, target in FORMATS.items():
                lost = bits_lost(extent.over(region), target)
                whole = module.Target(lost.numel(), int((lost > 0).sum()), int(lost.max()))
                assert tensor.targets[name][region] == whole, (tensor.name, name, region)


def test_a_summary_adds_regions_and_keeps_the_worst(micro_checkpoint):
    config = load_model_config(micro_checkpoint)
    first = next(tensor for tensor in module.survey(micro_checkpoint, config) if tensor.stored == "mxfp4")
    worse = {name: {r: module.Target(2, 1, 3) for r in regions} for name, regions in first.targets.items()}
    second = dataclasses.replace(first, exponents=(-90, 90), row_spread=180, targets=worse)
    group = module.summarise([first, second])[first.pattern]
    assert (group["tensors"], group["exponents"], group["row_spread"]) == (2, [-90, 90], 180)
    joined, before = group["targets"]["int8"]["group"], first.targets["int8"]["group"]
    assert joined == module.Target(before.num_regions + 2, before.num_rounded + 1, max(before.worst_bits, 3))
