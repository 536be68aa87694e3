// The whole surface of the native core: element types, thread pool, kernel table, this machine's ceilings.
//
// The core knows neither Python nor torch. Kernels take plain structs of pointers and sizes; pointers are to arrays that
// are contiguous unless a stride is named, counts are in elements unless the name ends in _bytes. Every kernel divides
// its work over the pool itself and returns when all of it is done. A row's result depends on that row alone: the order
// of every sum is fixed by the sizes of one row, never by how many rows a call has or how work was divided.
#pragma once

#include <cstdint>

#include "perilune/attention.h"
#include "perilune/kda.h"
#include "perilune/rows.h"
#include "perilune/sampling.h"
#include "perilune/threads.h"
#include "perilune/types.h"
#include "perilune/weights.h"

namespace perilune {

// ---- the kernel table -----------------------------------------------------------------------------------------------

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*quantize_rows)(const QuantizeArgs&);
  void (*moe_route)(const RouteArgs&);
  void (*moe_experts)(const ExpertsArgs&);
  void (*situ)(const SituArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*gated_rms_norm)(const GatedRmsNormArgs&);
  void (*layer_norm)(const LayerNormArgs&);
  void (*embed_rows)(const EmbedArgs&);
  void (*store_rows)(const StoreArgs&);
  void (*append_rows)(const AppendArgs&);
  void (*store_packed_rows)(const StorePackedArgs&);
  void (*add_rows)(const PairArgs&);
  void (*gate_rows)(const PairArgs&);
  void (*swiglu)(const PairArgs&);
  void (*scale_rows)(const ScaleArgs&);
  void (*attn_res_mix)(const AttnResArgs&);
  void (*short_conv)(const ConvArgs&);
  void (*kda_decay)(const DecayArgs&);
  void (*kda_recurrent)(const KdaArgs&);
  void (*kda_chunk)(const KdaArgs&);
  void (*kda_mix)(const KdaMixArgs&);
  void (*kda_verify)(const KdaVerifyArgs&);
  void (*kda_commit)(const KdaCommitArgs&);
  void (*mla_prefill)(const MlaArgs&);
  void (*mla_decode)(const MlaArgs&);
  void (*indexer_topk)(const IndexerArgs&);
  void (*rotary_turns)(const TurnsArgs&);
  void (*rotate)(const RotateArgs&);
  void (*gqa_rows)(const GqaRowsArgs&);
  void (*gqa_attention)(const GqaArgs&);
  void (*patch_attention)(const PatchAttentionArgs&);
  void (*gelu_tanh)(const GeluArgs&);
  void (*sample_tokens)(const SampleArgs&);
  void (*penalize)(const PenaltyArgs&);
  int64_t (*dots)(Type type, int64_t rounds);  // see kernels/ceilings.h
};

// The table in use. The first call picks the widest instruction set that the processor has.
const Kernels& kernels();
// Uses the named instruction set from now on ("baseline", "avx2", "avx512"); false where the processor lacks it.
bool use_isa(const char* name);
// Names of the instruction sets this processor can run, narrowest first, null at the end.
const char* const* available_isas();

// ---- what this machine can do at most -------------------------------------------------------------------------------

// Bytes per second that all threads read together, pass by pass, from `bytes` of fresh memory on huge pages. Each
// thread reads `streams` sequential streams in turns: which number is best differs between processors. False where
// there is no such memory.
bool read_rates(int64_t bytes, int streams, double* rates, int passes);
// The most multiplications and additions per second that all threads reached in registers within `seconds`; see
// kernels/ceilings.h for what is counted. Zero where the instruction set in use has no such product.
double dot_rate(Type type, double seconds);

}  // namespace perilune
