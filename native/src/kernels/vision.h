// The vision tower: rotary attention among the patches of each picture, and its activation. See ops/vision.
#pragma once

#include <algorithm>

#include "kernels/attention_block.h"

namespace perilune::PERILUNE_ISA {

// Queries that share one rotation of the keys, at most; their packed rows and contexts are a thread's scratch.
constexpr int64_t kMostPatches = 4096;
// Elements of a chunk of the activation.
constexpr int64_t kGeluChunk = 16384;

// Queries first .. end - 1 of the picture whose patches are begin .. stop - 1.
struct PatchSpan {
  int64_t first, end, begin, stop;
};

template <typename E>
const E* patch_row(const PatchAttentionArgs& args, int64_t patch, int64_t part, int64_t head) {
  return static_cast<const E*>(args.qkv) + ((patch * 3 + part) * args.heads + head) * args.width;
}

// One row of q or k with its adjacent pairs turned by the patch's angles, rounded to E, in a block of so many rows.
template <typename E, typename V>
void rotate_row(const PatchAttentionArgs& args, int64_t patch, int64_t part, int64_t head, V* out, int64_t block_rows) {
  const E* row = patch_row<E>(args, patch, part, head);
  const float *cos = args.cos + patch * (args.width / 2), *sin = args.sin + patch * (args.width / 2);
  for (int64_t c = 0; c < args.width; c += 2) {
    const float a = widen(row[c]), b = widen(row[c + 1]), x = cos[c / 2], y = sin[c / 2];
    V* pair = out + column_at<V>(block_rows, c);
    pair[0] = narrow<V>(rounded<E>(a * x - b * y));
    pair[1] = narrow<V>(rounded<E>(a * y + b * x));
  }
}

// Lanes of one head for the patches first .. first + count - 1, each of which sees all keys of its picture.
template <typename E, typename V = Operand<E>>
Lanes<V> patch_lanes(const PatchAttentionArgs& args, int64_t first, int64_t count, int64_t head, Scratch& scratch) {
  const int64_t width = args.width, padded = round_up(count, kLanes);
  Lanes<V> lanes = {count, padded, width, width, args.scale,
                    scratch.take<V>(row_cells<V>(width) * kCellValues<V> * padded), scratch.take<float>(padded),
                    scratch.take<float>(padded), scratch.take<float>(count * width), nullptr};
  Scratch rows;
  auto* q = rows.take<V>(count * width);
  for (int64_t i = 0; i < count; ++i) rotate_row<E>(args, first + i, 0, head, q + i * width, 1);
  pack_panels(q, count, width, width, lanes.q);
  begin(lanes);
  return lanes;
}

// Keys and values of patches first .. first + count - 1 in strips, and where values lie before they are paired.
template <typename E, typename V>
void read_patches(const PatchAttentionArgs& args, int64_t first, int64_t count, int64_t head, V* keys, V* values, V* unpaired) {
  const void* rows[kKeyBlock];
  for (int64_t i = 0; i < count; ++i) {
    V* key = keys + i * kStripValues<V>;
    rotate_row<E>(args, first + i, 1, head, key, kBlockRows);
    fill_strip(args.width, key, kBlockRows);
    rows[i] = patch_row<E>(args, first + i, 2, head);
  }
  if constexpr (kIsPaired<V>) {
    read_rows<E>(rows, count, args.width, unpaired, kBlockRows);
    pair_rows(unpaired, kBlockRows, count, args.width, values, kBlockCells<V>);
  } else {
    read_rows<E>(rows, count, args.width, values, kBlockRows);
  }
}

template <typename E>
void attend_patches(const PatchAttentionArgs& args, const PatchSpan& span, int64_t head) {
  Scratch scratch;
  using V = Operand<E>;
  const int64_t block_values = kBlockRows * row_cells<V>(args.width) * kCellValues<V>;
  auto* keys = scratch.take<V>(block_values);
  auto* values = scratch.take<V>(args.width * kCellValues<V> * kBlockCells<V>);
  auto* unpaired = scratch.take<V>(kIsPaired<V> ? block_values : 0);
  const int64_t groups = (span.end - span.first + kMostLanes - 1) / kMostLanes;
  auto* lanes = scratch.take<Lanes<V>>(groups);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = span.first + group * kMostLanes;
    lanes[group] = patch_lanes<E>(args, first, std::min(kMostLanes, span.end - first), head, scratch);
  }
  for (int64_t first = span.begin; first < span.stop; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, span.stop - first);
    read_patches<E>(args, first, count, head, keys, values, unpaired);
    for (int64_t group = 0; group < groups; ++group) attend(lanes[group], keys, values, first - span.begin, count, {});
  }
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t i = 0; i < lanes[group].count; ++i) {
      const int64_t patch = span.first + group * kMostLanes + i;
      E* o = static_cast<E*>(args.o) + ((patch - args.first) * args.heads + head) * args.width;
      const F total = set(lanes[group].total[i]);
      for (int64_t c = 0; c < args.width; c += kLanes)
        store(o + c, div(load(lanes[group].context + c / kStrip * kStrip * lanes[group].count + i * kStrip + c % kStrip), total));
    }
}

inline void patch_attention(const PatchAttentionArgs& args) {
  const int64_t total = args.end - args.first;
  // Several chunks for each thread, and none so short that rotating keys would outweigh attention.
  const int64_t wanted = total * args.heads / (4 * num_threads());
  const int64_t step = std::clamp(round_up(wanted, kMostLanes), 2 * kMostLanes, kMostPatches);
  Scratch scratch;
  auto* spans = scratch.take<PatchSpan>(total / step + args.count);
  int64_t num_spans = 0;
  for (int64_t n = 0; n < args.count; ++n) {
    const int64_t begin = args.cu_seqlens[n], stop = args.cu_seqlens[n + 1], end = std::min(args.end, stop);
    for (int64_t first = std::max(args.first, begin); first < end; first += step)
      spans[num_spans++] = {first, std::min(first + step, end), begin, stop};
  }
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel(num_spans * args.heads,
             [&](int64_t chunk) { attend_patches<E>(args, spans[chunk / args.heads], chunk % args.heads); });
  });
}

// y = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
inline void gelu_tanh(const GeluArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.count + kGeluChunk - 1) / kGeluChunk, [&](int64_t chunk) {
      const int64_t first = chunk * kGeluChunk;
      const E* x = static_cast<const E*>(args.x) + first;
      E* y = static_cast<E*>(args.y) + first;
      for_vectors(std::min(kGeluChunk, args.count - first), [&](auto load, auto store, int64_t i) {
        const F v = load(x + i), half = mul(v, set(0.5f));
        const F inner = mul(set(0.7978845608028654f), fma(mul(mul(v, v), v), set(0.044715f), v));
        store(y + i, fma(half, tanh(inner), half));
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
