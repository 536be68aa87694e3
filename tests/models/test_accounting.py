import pytest

from perilune.cache.spec import bytes_per_slot, bytes_per_token
from perilune.checkpoint.names import Part
from perilune.config.draft import parse_draft_config
from perilune.models.accounting import (
    account,
    attended_rows,
    cache_bytes_per_token,
    cache_bytes_read,
    conv_state_bytes,
    draft_cache_bytes_per_token,
    flops_per_token,
    record_bytes_per_token,
    recurrent_state_bytes,
    state_bytes_per_sequence,
)
from perilune.models.draft.block import cache_groups
from perilune.models.kda import record_groups
from tests.drafts import gqa_values, mla_values


@pytest.fixture
def k3(released_configs):
    return released_configs["k3"]


@pytest.fixture
def k31(released_configs):
    return released_configs["k31"]


def test_the_released_index_is_met_to_the_byte(k3):
    totals = account(k3)
    assert (totals.tensors, totals.total_size) == (497220, 1560860324864)


def test_parameters_are_those_of_the_published_tables(k3, k31):
    totals = account(k3)
    assert totals.parameters_total == 2779484476000
    assert totals.parameters_active == 104189612640
    assert totals.parameters_vision == 447358976
    assert totals.parameters_total + totals.parameters_vision == 2779931834976
    later = account(k31)
    assert later.parameters_total == 2779663002208
    assert later.parameters_active == 104189612640 + 178526208
    assert later.total_size == 1561217377280
    assert later.tensors == 497220 + 120


@pytest.mark.parametrize(
    ("part", "instances", "parameters", "num_bytes"),
    [
        (Part.KDA, 69, 443580416 + 160000 - 32, 887800832),
        (Part.MLA, 24, 232196096, 464392192),
        (Part.INDEXER, 24, 7438592, 14877184),
        (Part.MOE, 92, 189926912 + 896, 379857408),
        (Part.EXPERTS, 92, 29595009024, 15722348544),
        (Part.EXPERTS, 92 * 896, 33030144, 17547264),
        (Part.DENSE, 1, 726663168, 1453326336),
        (Part.EMBEDDING, 1, 1174405120, 2348810240),
        (Part.LM_HEAD, 1, 1174405120, 2348810240),
        (Part.VISION, 1, 401214464, 802428928),
        (Part.PROJECTOR, 1, 46144512, 92289024),
    ],
)
def test_each_part_is_that_of_the_published_table(k31, part, instances, parameters, num_bytes):
    row = account(k31).parts[part]
    assert (row.parameters, row.bytes) == (instances * parameters, instances * num_bytes)


def test_norms_are_six_rows_a_layer_and_three_at_the_end(k3):
    row = account(k3).parts[Part.NORMS]
    assert (row.parameters, row.bytes) == (93 * 43008 + 3 * 7168, 93 * 86016 + 3 * 7168 * 2)


def test_a_decode_step_reads_the_chosen_experts_and_all_but_the_embedding(k3):
    text_bytes = 1559965606912
    rest = text_bytes - 92 * 15722348544 - 2348810240
    assert rest == 113509540864 - 2348810240
    assert account(k3).decode_weight_bytes == 92 * 16 * 17547264 + rest


@pytest.mark.parametrize(
    ("latent", "index", "k3_bytes", "k31_bytes"),
    [
        ("bfloat16", "bfloat16", 27648, 33792),
        ("fp8", "fp8", 13824, 16992),
        ("fp8_ds_mla", "fp8", 15744, 18912),
        ("bfloat16", "mxfp4", 27648, 27648 + 1632),
        ("float32", "float32", 2 * 27648, 2 * 33792),
    ],
)
def test_cache_bytes_per_token_by_format(k3, k31, latent, index, k3_bytes, k31_bytes):
    assert cache_bytes_per_token(k3, latent, index) == k3_bytes
    assert cache_bytes_per_token(k31, latent, index) == k31_bytes


def test_state_bytes_do_not_depend_on_length(k3):
    assert recurrent_state_bytes(k3) == 69 * 6291456 == 434110464
    assert recurrent_state_bytes(k3, itemsize=2) == 217055232
    assert conv_state_bytes(k3) == 69 * 221184 == 15261696
    assert state_bytes_per_sequence(k3) == 449372160


def test_an_indexer_bounds_what_attention_reads(k3, k31):
    long = 100_000
    assert attended_rows(k3, long) == long
    assert attended_rows(k31, long) == 2048
    assert cache_bytes_read(k3, long) == 24 * long * 1152
    assert cache_bytes_read(k31, long) == 24 * (2048 * 1152 + long * 256)
    # Up to top-k rows everything is selected, so no index key is read.
    assert cache_bytes_read(k31, 2048) == cache_bytes_read(k3, 2048)


def test_operations_grow_with_context_by_attention_alone(k3, k31):
    per_row = 24 * 96 * 2 * (576 + 512)
    assert flops_per_token(k3, 1001) - flops_per_token(k3, 1) == 1000 * per_row
    scores = 24 * 32 * 2 * 129
    assert flops_per_token(k31, 6000) - flops_per_token(k31, 5000) == 1000 * scores


def test_operations_without_context_are_two_per_active_matrix_entry(k3):
    recurrence = 69 * 96 * 128 * 128 * 7
    vectors = 2 * 69 * (12288 * 13 + 96 + 128) + 2 * 24 * (1536 + 512) + 2 * 92 * (896 + 3584)
    norms = 2 * account(k3).parts[Part.NORMS].parameters
    assert flops_per_token(k3, 0) == 2 * 104189612640 - norms - vectors + recurrence


def test_a_float32_model_copies_everything_but_the_packed_experts(k3):
    assert account(k3).float32_copy_bytes == 4 * (56_732_525_568 + 11_120_224)


def test_quantising_saves_a_byte_an_entry_less_a_scale_per_output(k3):
    stored, quantised = account(k3), account(k3, is_quantised=True)
    kda = [(12288, 7168)] * 4 + [(96, 7168), (128, 7168), (12288, 128), (7168, 12288)]
    mla = [(1536, 7168), (96 * 192, 1536), (576, 7168), (12288, 7168), (7168, 12288)]
    moe = [(3584, 7168), (7168, 3584), (6144, 7168), (6144, 7168), (7168, 6144)]
    dense = [(33792, 7168), (33792, 7168), (7168, 33792)]
    made = 0
    for part, layers, shapes in [(Part.KDA, 69, kda), (Part.MLA, 24, mla), (Part.MOE, 92, moe), (Part.DENSE, 1, dense)]:
        saved = sum(outputs * columns - 4 * outputs for outputs, columns in shapes)
        assert stored.parts[part].bytes - quantised.parts[part].bytes == layers * saved, part
        made += layers * sum(outputs * columns + 4 * outputs for outputs, columns in shapes)
    assert quantised.converted_bytes == made
    kept = (Part.EMBEDDING, Part.LM_HEAD, Part.NORMS, Part.EXPERTS, Part.VISION, Part.PROJECTOR)
    assert all(stored.parts[part] == quantised.parts[part] for part in kept)


def test_a_decode_step_of_the_quantised_model_reads_what_the_published_plan_says(k3):
    """88 GB a token with attention, shared experts and dense layer in 8 bits; latents and kv_b count for the rest."""
    latents = 92 * 2 * 3584 * 7168
    assert account(k3, is_quantised=True).decode_weight_bytes == pytest.approx(87.9e9 - latents, rel=0.01)


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_records_of_verified_tokens_take_what_their_groups_take(k31, dtype, itemsize):
    groups = record_groups(k31.kda, len(k31.kda_layers))
    assert record_bytes_per_token(k31, itemsize) == bytes_per_slot(groups, dtype)
    assert record_bytes_per_token(k31) == 13_565_952  # docs/speculative.md: 13.6 MB


@pytest.mark.parametrize(("values", "row"), [(mla_values(), 48 + 16), (gqa_values(), 2 * 2 * 32)])
def test_rows_of_drafts_take_what_their_group_takes(values, row):
    draft = parse_draft_config(values)
    assert draft_cache_bytes_per_token(draft) == bytes_per_token(cache_groups(draft), "bfloat16") == 2 * row * 2
