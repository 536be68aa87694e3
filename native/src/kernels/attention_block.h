// Softmax attention of a group of queries over one block of keys after another, with fixed block borders.
#pragma once

#include <cfloat>

#include "kernels/attention_rows.h"

namespace perilune::PERILUNE_ISA {

// Keys of a block, counted from a query's first one: where a query's sums are rescaled depends on nothing else.
constexpr int64_t kKeyBlock = 96;
// Rows of a block's strips: one more, so that the strips of a row do not meet in the same cache sets.
constexpr int64_t kBlockRows = kKeyBlock + 1;
// Queries that go through a block together; their packed rows and contexts share the second-level cache with the keys.
constexpr int64_t kMostLanes = 96;

// Cells of a block's strips whose sums run over rows.
template <typename V>
constexpr int64_t kBlockCells = kKeyBlock / kCellValues<V> + 1;

// Queries that share keys and values: a token's heads, or a head's tokens. One lane is one query, and no lane's numbers
// depend on the others.
template <typename V>
struct Lanes {
  int64_t count, padded;  // padded to full vectors; the rest of q is zero
  int64_t width, value;   // of a key, of a value
  float scale;
  V* q;               // packed panels, [row_cells(width)][padded]
  float* peak;        // [padded], largest score so far
  float* total;       // [padded], sum of exp(score - peak)
  float* context;     // strips [value / kStrip][count][kStrip], sum of exp(score - peak) * value
  const float* last;  // [padded], ascending: index of the last key a lane sees; null: all see every key
};

template <typename V>
void begin(const Lanes<V>& lanes) {
  for (int64_t i = 0; i < lanes.padded; ++i) lanes.peak[i] = -FLT_MAX, lanes.total[i] = 0.0f;
  for (int64_t i = 0; i < lanes.count * lanes.value; ++i) lanes.context[i] = 0.0f;
}

// How many of the block's keys are seen by lane `i` or any before it.
template <typename V>
int64_t seen_by(const Lanes<V>& lanes, int64_t i, int64_t first, int64_t count) {
  if (lanes.last == nullptr) return count;
  const int64_t seen = static_cast<int64_t>(lanes.last[i < lanes.count ? i : lanes.count - 1]) + 1 - first;
  return seen < 0 ? 0 : seen < count ? seen : count;
}

// One vector of lanes: scores [count][stride] become cells of exp(score - peak), or 0 past a lane's last key.
// `decay` is what earlier sums shrink by.
template <bool kLimited, typename V>
void weigh(float* scores, int64_t stride, int64_t count, F last, float* peak, float* total, float* decay) {
  const F before = load(peak);
  F highest = before;
  for (int64_t s = 0; s < count; ++s) {
    F score = load(scores + s * stride);
    if (kLimited) score = select_less(last, set(static_cast<float>(s)), set(-FLT_MAX), score);
    highest = max(highest, score);
  }
  F sum = zero();
  const auto weight_of = [&](int64_t s) {
    F weight = exp(sub(load(scores + s * stride), highest));
    if (kLimited) weight = select_less(last, set(static_cast<float>(s)), zero(), weight);
    sum = add(sum, weight);
    return weight;
  };
  for (int64_t s = 0; s < count; s += kCellValues<V>) {
    float* at = scores + s / kCellValues<V> * stride;
    const F weight = weight_of(s);
    if constexpr (kIsPaired<V>)
      store(reinterpret_cast<Cell<V>*>(at), weight, s + 1 < count ? weight_of(s + 1) : zero());
    else
      store(at, weight);
  }
  const F shrunk = exp(sub(before, highest));
  store(total, fma(load(total), shrunk, sum));
  store(decay, shrunk);
  store(peak, highest);
}

// context = context * decay + weights^T values
template <typename V>
void gather_values(const Lanes<V>& lanes, const Cell<V>* weights, const float* decay, const Cell<V>* values,
                   int64_t first, int64_t count, Fetch& fetch) {
  const int64_t vector = strip_vector(lanes.count);
  for_panels(lanes.value, [&](auto vectors, int64_t column) {
    constexpr int kVectors = vectors();
    for_tiles<kTileRows>(lanes.count, [&](auto rows, int64_t lane) {
      const int64_t seen = seen_by(lanes, lane + rows() - 1, first, count);
      if (seen == 0) return;
      fetch.lines(kTileFetch);
      Sums<rows(), kVectors> sums;
      float* at = lanes.context + column * lanes.count + lane * kStrip;
      for_sums(sums, [&](F& sum, int r, int v) {
        sum = mul(load(at + r * kStrip + v * vector), set(decay[lane + r]));
      });
      multiply(weights + lane, 1, lanes.padded, values + column * kBlockCells<V>, kStrip,
               strip_vector(kBlockCells<V>), (seen + kCellValues<V> - 1) / kCellValues<V>, sums);
      for_sums(sums, [&](F& sum, int r, int v) { store(at + r * kStrip + v * vector, sum); });
    });
  });
}

// Lets the lanes attend to keys first .. first + count - 1 of a sequence, rows 0 .. count - 1 of blocks: keys
// [row_cells(width)] in strips of kBlockRows rows, values in strips of kBlockCells.
template <typename V>
void attend(const Lanes<V>& lanes, const V* keys, const V* values, int64_t first, int64_t count, Fetch fetch) {
  const int64_t seen = seen_by(lanes, lanes.count - 1, first, count);
  if (seen == 0) return;
  const bool is_limited = seen_by(lanes, 0, first, count) < seen;
  Scratch scratch;
  auto* weights = scratch.take<float>(seen * lanes.padded);
  auto* decay = scratch.take<float>(lanes.padded);
  for_panels(lanes.padded, [&](auto vectors, int64_t lane) {
    constexpr int64_t kWidth = vectors() * kLanes;
    const int64_t depth = row_cells<V>(lanes.width);
    panel_product<vectors()>(cells(keys), kBlockRows, seen_by(lanes, lane + kWidth - 1, first, count),
                             cells(lanes.q) + lane * depth, depth, {weights + lane, lanes.padded, kLanes},
                             [&](F sum) { return mul(sum, set(lanes.scale)); });
    for (int64_t i = lane; i < lane + kWidth; i += kLanes) {
      if (is_limited)
        weigh<true, V>(weights + i, lanes.padded, seen, sub(load(lanes.last + i), set(static_cast<float>(first))),
                       lanes.peak + i, lanes.total + i, decay + i);
      else
        weigh<false, V>(weights + i, lanes.padded, seen, zero(), lanes.peak + i, lanes.total + i, decay + i);
    }
  });
  gather_values(lanes, reinterpret_cast<const Cell<V>*>(weights), decay, cells(values), first, seen, fetch);
}

}  // namespace perilune::PERILUNE_ISA
