// Register tiles: small matrix products that run at the rate of the multiply-add units.
//
// An operand's values are floats, or bf16 where the processor multiplies these in pairs. What lies at one step of a sum
// is a cell of 32 bits: a float, or the two values that a pair adds.
#pragma once

#include <type_traits>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

// Rows and vectors of the largest tile: its sums fill the registers but for a column's vectors and one broadcast.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;
constexpr int kTileVectors = 2;
// Columns of a panel. A packed operand [cells][columns] lies panel by panel, each read from front to back; the last
// panel may be a single vector wide. Panel `first` starts at cells * first.
constexpr int64_t kPanel = kTileVectors * kLanes;
// So many of a panel's cells stay in the first-level cache while rows stream by.
constexpr int64_t kPanelDepth = 192;
// A block of rows lies in strips of this many cells, [cells / kStrip][rows][kStrip]: whether it is read along rows
// or along columns, the reads are neighbours.
constexpr int64_t kStrip = 16;

#ifdef PERILUNE_PAIRS
template <typename E>
using Operand = std::conditional_t<std::is_same_v<E, bf16>, bf16, float>;
template <typename V>
using Cell = std::conditional_t<std::is_same_v<V, bf16>, Pair, float>;
#else
template <typename E>
using Operand = float;
template <typename V>
using Cell = float;
#endif
template <typename V>
constexpr bool kIsPaired = !std::is_same_v<Cell<V>, float>;
template <typename V>
constexpr int64_t kCellValues = kIsPaired<V> ? 2 : 1;
template <typename V>
constexpr int64_t kStripValues = kStrip * kCellValues<V>;

// Cells of a row whose sums run along it, in whole strips.
template <typename V>
constexpr int64_t row_cells(int64_t width) {
  return (width + kStripValues<V> - 1) / kStripValues<V> * kStrip;
}
template <typename V>
Cell<V>* cells(V* values) {
  return reinterpret_cast<Cell<V>*>(values);
}
template <typename V>
const Cell<V>* cells(const V* values) {
  return reinterpret_cast<const Cell<V>*>(values);
}
// Where column c of a block's first row stands; sixteen columns from a multiple of sixteen on lie together.
template <typename V>
int64_t column_at(int64_t rows, int64_t c) {
  return c / kStripValues<V> * kStripValues<V> * rows + c % kStripValues<V>;
}

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
// Floats from one vector of a strip's row to the next, which is in the next strip where a vector fills one.
inline int64_t strip_vector(int64_t rows) { return kLanes == kStrip ? rows * kStrip : kLanes; }

template <typename E>
F round_to(F x) {
  if constexpr (std::is_same_v<E, float>) return x;
  E stored[kLanes];
  store(stored, x);
  return load(stored);
}

template <int kRows, int kVectors>
struct Sums {
  F v[kRows][kVectors];
};

template <typename Body, int kRows, int kVectors>
[[gnu::always_inline]] inline void for_sums(Sums<kRows, kVectors>& sums, const Body& body) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) body(sums.v[r][v], r, v);
}

// sums[r][v] += a[r a_row + k a_step] * b[k b_step + v b_vector] for k = 0 .. depth - 1, in this order.
template <typename C, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply(const C* a, int64_t a_row, int64_t a_step, const C* b, int64_t b_step,
                                            int64_t b_vector, int64_t depth, Sums<kRows, kVectors>& sums) {
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    decltype(load(b)) column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = load(b + v * b_vector);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto row = set(a[r * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums.v[r][v] = fma(row, column[v], sums.v[r][v]);
    }
  }
}

// Calls body(integral_constant rows, first) for pieces of [first, count): as many of kMost as fit, then smaller ones.
template <int kMost, typename Body>
[[gnu::always_inline]] inline void for_tiles(int64_t count, const Body& body, int64_t first = 0) {
  for (; first + kMost <= count; first += kMost) body(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1) {
    if (first < count) for_tiles<(kMost > 4 ? 4 : kMost / 2)>(count, body, first);
  }
}

// Calls body(integral_constant vectors, first) for the panels of `columns`, a multiple of kLanes: as many of kMost vectors
// as there are, then narrower ones.
template <int kMost = kTileVectors, typename Body>
[[gnu::always_inline]] inline void for_panels(int64_t columns, const Body& body, int64_t first = 0) {
  for (; first + kMost * kLanes <= columns; first += kMost * kLanes) body(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1) {
    if (first < columns) for_panels<kMost / 2>(columns, body, first);
  }
}

// Where a product goes: row r, vector v at data[r row + v vector].
struct Target {
  float* data;
  int64_t row, vector;
};

// out[r][v] = finish(sum over cells k of block[r][k] panel[k][v]) for `count` rows of a block in strips of `rows` rows;
// the sum runs in the order of k.
template <int kVectors, typename C, typename Finish>
void panel_product(const C* block, int64_t rows, int64_t count, const C* panel, int64_t depth, Target out,
                   const Finish& finish) {
  constexpr int64_t kWidth = kVectors * kLanes;
  for (int64_t k = 0; k < depth; k += kPanelDepth) {
    const int64_t end = k + kPanelDepth < depth ? k + kPanelDepth : depth;
    for_tiles<kTileRows>(count, [&](auto tile_rows, int64_t first) {
      Sums<tile_rows(), kVectors> sums;
      float* at = out.data + first * out.row;
      for_sums(sums, [&](F& sum, int r, int v) { sum = k == 0 ? zero() : load(at + r * out.row + v * out.vector); });
      for (int64_t strip = k; strip < end; strip += kStrip)
        multiply(block + strip * rows + first * kStrip, kStrip, 1, panel + strip * kWidth, kWidth, kLanes, kStrip, sums);
      for_sums(sums, [&](F& sum, int r, int v) {
        store(at + r * out.row + v * out.vector, end == depth ? finish(sum) : sum);
      });
    });
  }
}

// Packs `count` rows of `width` elements, `stride` apart, into panels whose columns are the rows, row_cells(width) deep;
// zeros fill the last strip and panel.
template <typename V, typename E>
void pack_panels(const E* rows, int64_t count, int64_t stride, int64_t width, V* out) {
  const int64_t depth = row_cells<V>(width);
  for_panels(round_up(count, kLanes), [&](auto vectors, int64_t first) {
    constexpr int64_t kWidth = vectors() * kLanes;
    V square[kWidth][kStripValues<V>];
    Cell<V>* panel = cells(out) + first * depth;
    for (int64_t c = 0; c < width; c += kStripValues<V>) {
      for (int64_t r = 0; r < kWidth; ++r)
        for (int64_t i = 0; i < kStripValues<V>; i += kLanes)
          store(square[r] + i, first + r < count && c + i < width ? load(rows + (first + r) * stride + c + i) : zero());
      for (int64_t j = 0; j < kStrip; ++j, panel += kWidth)
#pragma GCC unroll 16
        for (int64_t r = 0; r < kWidth; ++r) panel[r] = cells(square[r])[j];
    }
  });
}

}  // namespace perilune::PERILUNE_ISA
