// Products of int8 blocks in plain C++, one row of activations at a time.
#pragma once

#include "kernels/blocks.h"

namespace perilune::PERILUNE_ISA {

constexpr int kFewBlockTokens = 1;

inline float lane_sum(const float a[8]) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

template <bool nibbles, int T>
void blocks_few(const Matrix& w, int64_t row, const BlockRow<nibbles>* x, float* y, int64_t) {
  static_assert(T == 1);
  uint8_t padded[WeightGroup<nibbles>::kPadded];
  float lanes[kGroup] = {};
  for (int64_t group = 0; group < BlockRow<nibbles>::groups(w.columns); ++group) {
    const WeightGroup<nibbles> own(w, row, group, padded);
    for (int lane = 0; lane < kGroup; ++lane) {
      const int block = block_of_lane<nibbles>(lane);
      const auto* values = x->values + group * kGroupColumns;
      int32_t total = nibbles ? x->offsets[group * kGroup + lane] : 0;
      for (int i = 0; i < kBlock; ++i) {
        const uint8_t byte = own.data[nibbles ? block * 16 + i / 2 : block * kBlock + i];
        const int weight = nibbles ? kRaisedCodes[i % 2 == 0 ? byte & 15 : byte >> 4] : static_cast<int8_t>(byte);
        total += weight * values[BlockRow<nibbles>::place(lane, i)];
      }
      const float scale = nibbles ? std::ldexp(1.0f, own.scales[block] - 127) : 1.0f;
      lanes[lane] += static_cast<float>(total) * (scale * x->scales[group * kGroup + lane]);
    }
  }
  *y = lane_sum(lanes);
}

template <bool nibbles>
void blocks_many(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, int64_t count, float* y,
                 int64_t y_stride) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t i = 0; i < count; ++i) blocks_few<nibbles, 1>(w, row, x + i, y + i * y_stride + row - first, y_stride);
}

}  // namespace perilune::PERILUNE_ISA
