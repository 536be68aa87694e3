// Activations rounded to int8 in blocks of 32 columns, and how they lie for the products with int8 and MXFP4 weights.
//
// The order of one product's sum: the sum of a block is an exact integer. Block b belongs to one of eight lanes by
// b mod 8; a lane adds its blocks' sums, each times the scales, by multiply-adds over ascending b, from zero. The lanes
// are added up in the order of `lane_sum`, and an int8 weight's row scale is applied last.
#pragma once

#include <cmath>
#include <cstring>

#include "perilune.h"
#include "simd/element.h"

namespace perilune::PERILUNE_ISA {

constexpr int kBlock = 32;
constexpr int kGroup = 8;  // blocks of a group: one of each lane
constexpr int kGroupColumns = kBlock * kGroup;

// Block of each lane within a group. Packed weights are decoded two blocks at a time, which orders their lanes.
template <bool nibbles>
constexpr int block_of_lane(int lane) {
  return nibbles ? (lane < 4 ? 2 * lane : 2 * (lane - 4) + 1) : lane;
}

// One row of activations, in groups that are padded with zeros. `values` hold a block in order (int16, as the widened
// int8 weights want them) or, for nibbles, two blocks side by side (int8): the even columns of both, then the odd ones.
template <bool nibbles>
struct BlockRow {
  using Value = std::conditional_t<nibbles, int8_t, int16_t>;

  Value* values;    // [groups * 256]
  float* scales;    // [groups * 8], by lane; halved for nibbles, whose weights are stored doubled
  int32_t* offsets;  // [groups * 8], by lane, for nibbles: -12 times the sum of the block's values

  static int64_t groups(int64_t columns) { return (columns + kGroupColumns - 1) / kGroupColumns; }
  static int64_t bytes(int64_t columns) { return groups(columns) * (kGroupColumns * sizeof(Value) + kGroup * 8); }

  BlockRow(char* data, int64_t columns)
      : values(reinterpret_cast<Value*>(data)),
        scales(reinterpret_cast<float*>(values + groups(columns) * kGroupColumns)),
        offsets(reinterpret_cast<int32_t*>(scales + groups(columns) * kGroup)) {}

  // Where column i (0 to 31) of a lane's block stands in its group.
  static int place(int lane, int i) {
    const int block = block_of_lane<nibbles>(lane);
    if (!nibbles) return block * kBlock + i;
    return block / 2 * 64 + i % 2 * 32 + block % 2 * 16 + i / 2;
  }
};

// Rounds x to round(x * (127 / m)), m the block's largest magnitude, ties to even; the scale is m / 127.
template <bool nibbles, typename E>
void pack_blocks(const E* x, int64_t columns, const BlockRow<nibbles>& to) {
  using Value = typename BlockRow<nibbles>::Value;
  for (int64_t group = 0; group < BlockRow<nibbles>::groups(columns); ++group)
    for (int lane = 0; lane < kGroup; ++lane) {
      const int64_t first = group * kGroupColumns + block_of_lane<nibbles>(lane) * kBlock;
      float block[kBlock], largest = 0.0f;
      for (int i = 0; i < kBlock; ++i) {
        block[i] = first + i < columns ? widen(x[first + i]) : 0.0f;
        largest = std::fabs(block[i]) > largest ? std::fabs(block[i]) : largest;
      }
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      int32_t total = 0;
      for (int i = 0; i < kBlock; ++i) {
        const auto value = static_cast<Value>(std::nearbyintf(block[i] * inverse));
        to.values[group * kGroupColumns + BlockRow<nibbles>::place(lane, i)] = value;
        total += value;
      }
      to.scales[group * kGroup + lane] = largest / 127.0f * (nibbles ? 0.5f : 1.0f);
      to.offsets[group * kGroup + lane] = -12 * total;
    }
}

// E2M1 doubled and raised by 12, so that it is unsigned.
constexpr uint8_t kRaisedCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The weights of one group of a row; a last group that is not full is copied and padded with zeros.
template <bool nibbles>
struct WeightGroup {
  const uint8_t* data;
  const uint8_t* scales;

  WeightGroup(const Matrix& w, int64_t row, int64_t group, uint8_t* padded) {
    constexpr int64_t kBytes = nibbles ? kGroupColumns / 2 : kGroupColumns;
    const int64_t row_bytes = type_bytes(w.type, w.columns), at = group * kBytes;
    data = static_cast<const uint8_t*>(w.data) + row * row_bytes + at;
    scales = nibbles ? static_cast<const uint8_t*>(w.scales) + row * (w.columns / kBlock) + group * kGroup : nullptr;
    if (at + kBytes <= row_bytes) return;
    std::memset(padded, 0, kBytes + kGroup);
    std::memcpy(padded, data, row_bytes - at);
    data = padded;
    if (!nibbles) return;
    std::memcpy(padded + kBytes, scales, w.columns / kBlock - group * kGroup);
    scales = padded + kBytes;
  }
  static constexpr int kPadded = kGroupColumns + kGroup;
};

}  // namespace perilune::PERILUNE_ISA
