"""Parsers of the parts of the text configuration and of the vision section: one function per part, all strict."""

from perilune.config.model import IndexerConfig, KDAConfig, MLAConfig, MoEConfig, VisionConfig
from perilune.config.section import Section
from perilune.errors import ConfigError

MXFP4_GROUP = 32
DEFAULT_INDEXER = IndexerConfig(num_heads=32, head_dim=128, topk=2048)

# Library defaults that the released files carry and no implementation reads.
# fmt: off
NO_EFFECT_KEYS = frozenset((
    "_name_or_path", "add_cross_attention", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "head_dim", "id2label", "ignore_index",
    "image_placeholder", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torchscript", "transformers_version", "typical_p", "use_bfloat16",
    "use_cache",
))
# fmt: on

DSA_ALIASES = {
    "heads": ("index_n_heads", "n_heads", "num_heads"),
    "head_dim": ("index_head_dim", "head_dim"),
    "topk": ("index_topk", "top_k", "topk"),
    "layers": ("dsa_layers", "layers", "full_attn_layers"),
    "types": ("indexer_types", "types"),
}


QUANTIZED_WEIGHTS: dict[str, object] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": MXFP4_GROUP,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "actorder": None,
    "block_structure": None,
    "zp_dtype": None,
}

FIXED_VISION: dict[str, object] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}


def check_quantization(quant: Section) -> None:
    quant.fixed("quant_method", "compressed-tensors")
    quant.fixed("format", "mxfp4-pack-quantized")
    quant.fixed("quantization_status", "compressed", optional=True)
    quant.fixed("kv_cache_scheme", None, optional=True)
    # Which tensors are packed is read off the stored names: two of these patterns contradict the released file.
    quant.skip("ignore", "global_compression_ratio")
    groups = quant.section("config_groups")
    group = groups.section("group_0")
    group.fixed("targets", ["Linear"])
    group.fixed("format", "mxfp4-pack-quantized", optional=True)
    group.fixed("input_activations", None, optional=True)
    group.fixed("output_activations", None, optional=True)
    weights = group.section("weights")
    for key, value in QUANTIZED_WEIGHTS.items():
        weights.fixed(key, value, optional=value is None or key == "scale_dtype")
    weights.skip("observer", "observer_kwargs")
    for section in (weights, group, groups, quant):
        section.finish()


def parse_kda(section: Section, num_layers: int) -> tuple[KDAConfig, tuple[int, ...]]:
    section.fixed("use_full_rank_gate", True)
    bound = section.number("gate_lower_bound")
    if not -5.0 <= bound < 0.0:
        # The chunked form multiplies up to 16 decays before it rescales; a lower bound would overflow float32.
        section.refuse("gate_lower_bound", bound, "a number from -5 to below 0")
    kda = KDAConfig(
        num_heads=section.integer("num_heads"),
        head_dim=section.integer("head_dim"),
        short_conv_kernel_size=section.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=bound,
    )
    full, linear = section.layers("full_attn_layers", num_layers), section.layers("kda_layers", num_layers)
    section.finish()
    # the lengths first, since a wrong number of layers can be too large to count up to
    if len(full) + len(linear) != num_layers or sorted(full + linear) != list(range(num_layers)):
        raise ConfigError(
            f"{section.name}.full_attn_layers and kda_layers must name each of the {num_layers} layers exactly once; "
            f"found {len(full)} and {len(linear)} with {len(set(full) & set(linear))} in both"
        )
    return kda, full


def parse_mla(text: Section) -> MLAConfig:
    heads = text.integer("num_attention_heads")
    text.fixed("num_key_value_heads", heads)
    return MLAConfig(
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
    )


def parse_moe(text: Section) -> MoEConfig:
    moe = MoEConfig(
        num_experts=text.integer("num_experts"),
        num_experts_per_token=text.integer("num_experts_per_token"),
        num_shared_experts=text.integer("num_shared_experts"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        routed_expert_hidden_size=text.integer("routed_expert_hidden_size"),
        moe_renormalize=text.boolean("moe_renormalize"),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
    )
    for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if getattr(moe, key) % MXFP4_GROUP:
            text.refuse(key, getattr(moe, key), f"a multiple of {MXFP4_GROUP}, the MXFP4 group")
    if moe.num_experts_per_token > moe.num_experts:
        text.refuse("num_experts_per_token", moe.num_experts_per_token, f"at most num_experts, {moe.num_experts}")
    return moe


def parse_indexer(
    arch: str, top: Section, text: Section, full_attn_layers: tuple[int, ...], num_layers: int
) -> IndexerConfig | None:
    holders = [section for section in (top, text) if "dsa_config" in section]
    if arch == "k3":
        if holders:
            holders[0].refuse("dsa_config", holders[0].get("dsa_config"), "absent: only the K3.1 architecture has it")
        return None
    if len(holders) != 1:
        raise ConfigError(
            f"dsa_config is given {len(holders)} times; K3.1 needs it once, in text_config or at top level"
        )
    dsa = holders[0].section("dsa_config")
    keys = {use: _alias(dsa, names) for use, names in DSA_ALIASES.items()}
    indexer = IndexerConfig(
        num_heads=dsa.integer(keys["heads"], default=DEFAULT_INDEXER.num_heads),
        head_dim=dsa.integer(keys["head_dim"], default=DEFAULT_INDEXER.head_dim),
        topk=dsa.integer(keys["topk"], default=DEFAULT_INDEXER.topk),
    )
    if keys["layers"] in dsa and dsa.layers(keys["layers"], num_layers) != full_attn_layers:
        dsa.refuse(keys["layers"], dsa.get(keys["layers"]), "the same list as linear_attn_config.full_attn_layers")
    types = dsa.get(keys["types"], "full")
    if types != "full" and not (isinstance(types, list) and types and set(map(str, types)) == {"full"}):
        dsa.refuse(keys["types"], types, '"full" for every layer')
    dsa.skip(*(name for names in DSA_ALIASES.values() for name in names))
    dsa.finish()
    return indexer


def _alias(section: Section, names: tuple[str, ...]) -> str:
    given = [name for name in names if name in section]
    if len(given) > 1:
        raise ConfigError(f"{section.name} gives {' and '.join(given)}, which mean the same; keep one")
    return given[0] if given else names[0]


def parse_vision(section: Section) -> VisionConfig:
    """Reads `vision_config`; tower variants other than the released one are refused."""
    for key, value in FIXED_VISION.items():
        section.fixed(key, value)
    section.fixed("video_attn_type", "spatial_temporal", optional=True)
    section.fixed("dtype", "bfloat16", optional=True)
    section.skip("_attn_implementation")
    kernel = section.get("merge_kernel_size")
    if kernel != [2, 2]:
        section.refuse("merge_kernel_size", kernel, "[2, 2]")
    vision = VisionConfig(
        vt_hidden_size=section.integer("vt_hidden_size"),
        vt_intermediate_size=section.integer("vt_intermediate_size"),
        vt_num_attention_heads=section.integer("vt_num_attention_heads"),
        vt_num_hidden_layers=section.integer("vt_num_hidden_layers"),
        qkv_hidden_size=section.integer("qkv_hidden_size"),
        mm_hidden_size=section.integer("mm_hidden_size"),
        text_hidden_size=section.integer("text_hidden_size"),
        patch_size=section.integer("patch_size"),
        init_pos_emb_height=section.integer("init_pos_emb_height"),
        init_pos_emb_width=section.integer("init_pos_emb_width"),
        init_pos_emb_time=section.integer("init_pos_emb_time"),
        merge_kernel_size=(2, 2),
        projector_ln_eps=section.positive("projector_ln_eps"),
    )
    section.fixed("mm_hidden_size", vision.vt_hidden_size)
    # a head's channels turn in fours: a pair by the column, a pair by the row
    if vision.qkv_hidden_size % (4 * vision.vt_num_attention_heads):
        section.refuse("qkv_hidden_size", vision.qkv_hidden_size, "a multiple of 4 * vt_num_attention_heads")
    section.finish()
    return vision
