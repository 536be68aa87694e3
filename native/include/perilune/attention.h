// Arguments of attention over paged rows, of the indexer, and of attention among patches.
#pragma once

#include "perilune/types.h"

namespace perilune {

// Latent attention, see ops/mla. w_uk [heads, key, latent], w_uv [heads, value, latent] with their own strides from head
// to head. selected [tokens, num_selected] holds positions, -1 for none, or is null for every visible row.
struct MlaArgs {
  const void* q;  // [tokens, heads, key + shared], `q_stride` from token to token
  Type type;
  int64_t q_stride;
  Pages pages;  // rows [latent | shared] of row_type; of i8 and f8 packed, the latent quantised, at even addresses
  Type row_type;
  Sequences sequences;
  const void* w_uk;
  const void* w_uv;
  Type weight_type;
  int64_t uk_stride, uv_stride;
  int64_t heads, key, shared, latent, value;
  float scale;
  const int64_t* selected;
  int64_t num_selected;
  void* o;  // [tokens, heads, value]
};

// turns [tokens, 2 * pairs]: cosines and sines of position * frequency, times `factor`.
struct TurnsArgs {
  const double* frequencies;  // [pairs]
  int64_t pairs;
  double factor;
  const int64_t* seq_lens;  // [count], tokens of each sequence, those of this call included
  const int64_t* cu_seqlens;
  int64_t count;
  float* turns;
};

// y = x [tokens, heads, width] with the last `turned` columns of each head turned: pairs (2 p, 2 p + 1) of them, or
// (p, p + turned / 2).
struct RotateArgs {
  const void* x;
  Type type;
  int64_t tokens, heads, width, turned;
  const float* turns;  // [tokens, turned]: cosines, then sines
  bool is_interleaved;
  void* y;
};

// rows [tokens, 2 * groups * width]: heads of k normed and turned, then v; k and v [tokens, groups * width].
struct GqaRowsArgs {
  const void* k;
  const void* v;
  Type type;
  int64_t tokens, groups, width;
  const void* norm;  // [width]
  Type norm_type;
  float eps;
  const float* turns;  // [tokens, width]
  bool is_interleaved;
  void* rows;
};

// Grouped-query attention, see ops/gqa: rows [keys of all groups | values of all groups] of `type`.
struct GqaArgs {
  const void* q;  // [tokens, heads, width]
  Type type;
  Pages pages;
  Sequences sequences;
  int64_t heads, groups, width;
  float scale;
  void* o;
};

// The lightning indexer, see ops/indexer: selected [tokens, topk], ties to the lower position, -1 fills the rest.
struct IndexerArgs {
  const void* q;  // [tokens, heads, width]
  Type type;
  const float* weights;  // [tokens, heads]
  Pages pages;           // keys [width] of key_type; of i8, f8 and mxfp4 packed
  Type key_type;
  Sequences sequences;
  int64_t heads, width, topk;
  int64_t* selected;
};

// Rotary attention among the patches of each picture, see ops/vision. Patches cu_seqlens[n] .. cu_seqlens[n + 1] belong to
// picture n of `count`; cos and sin turn the adjacent pairs of a row of q or k. Patches first .. end - 1 are queries.
struct PatchAttentionArgs {
  const void* qkv;  // [patches, 3, heads, width]
  Type type;
  int64_t heads, width;
  const float* cos;  // [patches, width / 2]
  const float* sin;
  const int64_t* cu_seqlens;  // [count + 1]
  int64_t count;
  float scale;
  int64_t first, end;
  void* o;  // [end - first, heads, width]
};

}  // namespace perilune
