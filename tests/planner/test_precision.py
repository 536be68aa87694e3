import pytest

from perilune.checkpoint.names import Part
from perilune.errors import ConfigError
from perilune.parallel.placement import Split
from perilune.planner.precision import Precision, pieces, workspace_bytes_per_layer


def size(config, precision, *parts):
    return sum(piece.total_bytes for piece in pieces(config, precision) if piece.part in parts)


def test_experts_by_format(k3):
    count, channels = 92 * 896, 3072 + 3584 + 3072
    assert size(k3, Precision(), Part.EXPERTS) == count * 17547264
    assert size(k3, Precision("mxfp4_via_fp8"), Part.EXPERTS) == count * 17547264
    assert size(k3, Precision("fp8"), Part.EXPERTS) == count * (33030144 + 4 * channels)
    assert size(k3, Precision("int4"), Part.EXPERTS) == count * (33030144 // 2 + 12 * channels)


def test_fp8_halves_the_matrices_of_attention_and_adds_a_scale_per_channel(k3):
    matrices = 5 * 12288 * 7168 + 96 * 7168 + 128 * 7168 + 12288 * 128
    channels = 4 * 12288 + 7168 + 96 + 128 + 12288
    rest = 4 * (3 * 12288 * 4 + 12288 + 128 + 128)
    assert size(k3, Precision(dense="fp8"), Part.KDA) == 69 * (matrices + 4 * channels + rest)
    assert size(k3, Precision(dense="int8"), Part.KDA) == size(k3, Precision(dense="fp8"), Part.KDA)


def test_router_latents_head_norms_and_indexer_keep_their_form(k31):
    kept = (Part.EMBEDDING, Part.LM_HEAD, Part.NORMS, Part.INDEXER, Part.VISION, Part.PROJECTOR)
    assert size(k31, Precision(dense="fp8"), *kept) == size(k31, Precision(), *kept)
    shared = 92 * 3 * 6144 * 7168
    saved = size(k31, Precision(), Part.MOE) - size(k31, Precision(dense="fp8"), Part.MOE)
    assert saved == shared - 92 * 4 * (2 * 6144 + 7168)


def test_float32_doubles_what_is_bfloat16_but_no_expert(k3):
    wide = Precision(dense="float32", latent="float32", index="float32")
    assert size(k3, wide, Part.LM_HEAD) == 2 * size(k3, Precision(), Part.LM_HEAD)
    assert size(k3, wide, Part.EXPERTS) == size(k3, Precision(), Part.EXPERTS)


def test_the_replication_rule(k31):
    replicated = sum(p.total_bytes for p in pieces(k31, Precision()) if p.split is Split.REPLICATED)
    low_rank = 24 * 2 * (1536 * 7168 + 1536 + 576 * 7168 + 512) + 69 * (2 * 128 * 7168 + 4 * 128)
    decay = 69 * 4 * 128  # A_log with the zeros behind its heads
    latents = 92 * (2 * (2 * 3584 * 7168 + 3584) + 2 * 896 * 7168 + 4 * 896)
    norms, indexer, vision = 93 * 86016 + 3 * 7168 * 2, 24 * 14877184, 894717952
    assert replicated == low_rank + decay + latents + norms + indexer + vision
    assert all(p.split is not Split.REPLICATED for p in pieces(k31, Precision(), shards_everything=True))


def test_the_workspace_is_one_layer_of_experts_in_fp8(k3):
    assert workspace_bytes_per_layer(k3) == 896 * (33030144 + 4 * 9728)


@pytest.mark.parametrize(
    ("precision", "loss"),
    [
        (Precision(), "lossless"),
        (Precision(dense="float32", latent="float32", index="float32"), "lossless"),
        (Precision(experts="int4"), "rounding"),
        (Precision(dense="fp8"), "rounding"),
        (Precision(latent="fp8"), "rounding"),
        (Precision(index="mxfp4"), "rounding"),
    ],
)
def test_loss_is_the_worst_of_the_parts(precision, loss):
    assert precision.loss == loss


def test_fp8_experts_are_exact_only_where_the_scales_allow():
    assert Precision("fp8").loss.startswith("unknown")
    assert Precision("fp8", "fp8").loss == "rounding"


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="dense is 'fp6'; allowed: bf16, fp8, int8, float32"):
        Precision(dense="fp6")
