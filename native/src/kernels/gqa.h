// Grouped-query attention over paged rows, and what such a row is made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention_rows.h"
#include "kernels/rotary.h"

namespace perilune::PERILUNE_ISA {

inline void gqa_rows(const GqaRowsArgs& args) {
  const int64_t size = args.groups * args.width, step = rows_per_chunk(2 * size);
  with_element(args.type, [&](auto* e) {
    with_element(args.norm_type, [&](auto* w) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
      using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
      parallel((args.tokens + step - 1) / step, [&](int64_t chunk) {
        for (int64_t t = chunk * step; t < args.tokens && t < (chunk + 1) * step; ++t) {
          E* row = static_cast<E*>(args.rows) + t * 2 * size;
          for (int64_t head = 0; head < args.groups; ++head) {
            E* key = row + head * args.width;
            rms_norm_row(static_cast<const E*>(args.k) + t * size + head * args.width,
                         static_cast<const W*>(args.norm), args.width, args.eps, key);
            turn(key, args.turns + t * args.width, args.width, args.is_interleaved, key);
          }
          std::memcpy(row + size, static_cast<const E*>(args.v) + t * size, static_cast<size_t>(size) * sizeof(E));
        }
      });
    });
  });
}

// One token's query heads that read one key head, over the rows it sees. Sums go over rows in order.
template <typename E>
void gqa_group(const GqaArgs& args, int64_t n, int64_t token, int64_t group) {
  const int64_t width = args.width, readers = args.heads / args.groups, size = args.groups * width;
  const int64_t count = visible_rows(args.pages, args.sequences, n, token), first = group * readers;
  Scratch scratch;
  float* q = scratch.take<float>(readers * width);
  float* scores = scratch.take<float>(readers * count);  // [readers, count]
  float* o = scratch.take<float>(readers * width);
  const E* from = static_cast<const E*>(args.q) + (token * args.heads + first) * width;
  for (int64_t c = 0; c < readers * width; c += kLanes) store(q + c, load(from + c)), store(o + c, zero());
  for (int64_t r = 0; r < count; ++r) {
    const E* key = static_cast<const E*>(row_at(args.pages, n, r)) + group * width;
    for (int64_t j = 0; j < readers; ++j) {
      F total = zero();
      for (int64_t c = 0; c < width; c += kLanes) total = fma(load(q + j * width + c), load(key + c), total);
      scores[j * count + r] = sum(total) * args.scale;
    }
  }
  for (int64_t j = 0; j < readers; ++j) {
    float* own = scores + j * count;
    const float peak = *std::max_element(own, own + count);
    float total = 0.0f;
    for (int64_t r = 0; r < count; ++r) total += own[r] = std::exp(own[r] - peak);
    for (int64_t r = 0; r < count; ++r) own[r] = rounded<E>(own[r] / total);
  }
  for (int64_t r = 0; r < count; ++r) {
    const E* value = static_cast<const E*>(row_at(args.pages, n, r)) + size + group * width;
    for (int64_t j = 0; j < readers; ++j) {
      const F share = set(scores[j * count + r]);
      float* to = o + j * width;
      for (int64_t c = 0; c < width; c += kLanes) store(to + c, fma(share, load(value + c), load(to + c)));
    }
  }
  E* to = static_cast<E*>(args.o) + (token * args.heads + first) * width;
  for (int64_t c = 0; c < readers * width; c += kLanes) store(to + c, load(o + c));
}

// Chunks are (token, key head).
inline void gqa_attention(const GqaArgs& args) {
  const Sequences& sequences = args.sequences;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel(sequences.cu_seqlens[sequences.count] * args.groups, [&](int64_t chunk) {
      const int64_t token = chunk / args.groups;
      const int64_t* end = std::upper_bound(sequences.cu_seqlens, sequences.cu_seqlens + sequences.count + 1, token);
      gqa_group<E>(args, end - sequences.cu_seqlens - 1, token, chunk % args.groups);
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
