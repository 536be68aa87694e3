// The kernel table of one instruction set. Included once by each src/isa/*.cpp, after its simd header.
#pragma once

#include "kernels/attn_res.h"
#include "kernels/ceilings.h"
#include "kernels/linear.h"
#include "kernels/mla.h"
#include "kernels/moe.h"
#include "kernels/norm.h"
#include "kernels/quantize.h"

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
    /* gated_rms_norm */ nullptr,
    /* layer_norm */ nullptr,
    /* attn_res_mix */ attn_res_mix,
    /* short_conv */ nullptr,
    /* kda_decay */ nullptr,
    /* kda_recurrent */ nullptr,
    /* kda_chunk */ nullptr,
    /* kda_mix */ nullptr,
    /* mla_prefill */ mla_prefill,
    /* mla_decode */ mla_decode,
    /* indexer_topk */ nullptr,
    /* dots */ dots,
};

}  // namespace perilune::PERILUNE_ISA
