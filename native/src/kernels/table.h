// The kernel table of one instruction set. Included once by each src/isa/*.cpp, after its simd header.
#pragma once

#include "kernels/attn_res.h"
#include "kernels/ceilings.h"
#include "kernels/conv.h"
#include "kernels/gqa.h"
#include "kernels/indexer.h"
#include "kernels/kda.h"
#include "kernels/kda_chunk.h"
#include "kernels/kda_mix.h"
#include "kernels/kda_verify.h"
#include "kernels/linear.h"
#include "kernels/mla.h"
#include "kernels/moe.h"
#include "kernels/norm.h"
#include "kernels/packed_rows.h"
#include "kernels/quantize.h"
#include "kernels/rotary.h"
#include "kernels/rows.h"
#include "kernels/sample.h"
#include "kernels/vision.h"

namespace perilune::PERILUNE_ISA {

extern const Kernels table;
const Kernels table = {
    /* isa */ kIsa,
    /* linear */ linear,
    /* quantize_rows */ quantize_rows,
    /* moe_route */ moe_route,
    /* moe_experts */ moe_experts,
    /* situ */ situ,
    /* rms_norm */ rms_norm,
    /* gated_rms_norm */ gated_rms_norm,
    /* layer_norm */ layer_norm,
    /* embed_rows */ embed_rows,
    /* store_rows */ store_rows,
    /* append_rows */ append_rows,
    /* store_packed_rows */ store_packed_rows,
    /* add_rows */ add_rows,
    /* gate_rows */ gate_rows,
    /* swiglu */ swiglu,
    /* scale_rows */ scale_rows,
    /* attn_res_mix */ attn_res_mix,
    /* short_conv */ short_conv,
    /* kda_decay */ kda_decay,
    /* kda_recurrent */ kda_recurrent,
    /* kda_chunk */ kda_chunk,
    /* kda_mix */ kda_mix,
    /* kda_verify */ kda_verify,
    /* kda_commit */ kda_commit,
    /* mla_prefill */ mla_prefill,
    /* mla_decode */ mla_decode,
    /* indexer_topk */ indexer_topk,
    /* rotary_turns */ rotary_turns,
    /* rotate */ rotate,
    /* gqa_rows */ gqa_rows,
    /* gqa_attention */ gqa_attention,
    /* patch_attention */ patch_attention,
    /* gelu_tanh */ gelu_tanh,
    /* sample_tokens */ sample_tokens,
    /* penalize */ penalize,
    /* dots */ dots,
};

}  // namespace perilune::PERILUNE_ISA
