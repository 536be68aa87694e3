// Dot products with activations as they are.
//
// The order of one product's sum, whatever else a call computes: columns are cut into chunks of kChunkColumns, a chunk
// into units of four vectors. Vector s of every unit goes to stream s; a stream is summed by multiply-adds over
// ascending units, from zero. The streams of all chunks are added up in order, at last the lanes of the total.
//
// Activations and decoded weights lie stream by stream, so that a pass over one stream reads whole cache lines.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kChunkColumns = 4096;
constexpr int kStreams = 4;
// A panel of decoded weight rows stays in the second cache, beside the activations of a register tile.
constexpr int64_t kPanelBytes = 288 << 10;

// Float32 vectors, multiplied and added in float32.
struct Floats {
  using Element = float;
  using Vector = F;
  static constexpr int kStep = kLanes;  // columns of a vector
  static constexpr const int* kNibbleOrder = kFloatNibbleOrder;
  static Vector load(const float* p) { return PERILUNE_ISA::load(p); }
  static void store(float* p, Vector v) { PERILUNE_ISA::store(p, v); }
  static float element(float x) { return x; }
  static float element(bf16 x) { return widen(x); }
  static F step(Vector w, Vector x, F total) { return fma(w, x, total); }
};

template <typename O>
constexpr int kUnit = kStreams * O::kStep;

// A row of weights that lie element by element.
template <typename E>
struct ElementRow {
  const E* data;

  template <typename O>
  void decode(int64_t column, typename O::Vector v[kStreams]) const {
    for (int s = 0; s < kStreams; ++s) load_weights(data + column + s * O::kStep, v[s]);
  }
  // The last columns of a row, fewer than a unit; the rest is zero.
  template <typename O>
  void decode_some(int64_t column, int64_t count, typename O::Vector v[kStreams]) const {
    E padded[kUnit<O>] = {};
    std::memcpy(padded, data + column, count * sizeof(E));
    ElementRow{padded}.template decode<O>(0, v);
  }
};

struct NibbleRow {
  const uint8_t* data;
  const uint8_t* scales;

  template <typename O>
  void decode(int64_t column, typename O::Vector v[kStreams]) const {
    constexpr int kVectors = 32 / O::kStep;  // of a group
    for (int group = 0; group < kUnit<O> / 32; ++group)
      decode_nibbles(data + column / 2 + 16 * group, scales + column / 32 + group, v + kVectors * group);
  }
  template <typename O>
  void decode_some(int64_t column, int64_t count, typename O::Vector v[kStreams]) const {
    uint8_t padded[kUnit<O> / 2] = {}, padded_scales[kUnit<O> / 32] = {};
    std::memcpy(padded, data + column / 2, count / 2);
    std::memcpy(padded_scales, scales + column / 32, count / 32);
    NibbleRow{padded, padded_scales}.decode<O>(0, v);
  }
};

// Rows of a weight, and what each product is multiplied by at the end.
template <typename Row>
struct Rows {
  const Matrix& w;

  Row operator[](int64_t row) const {
    const char* data = static_cast<const char*>(w.data) + type_bytes(w.type, row * w.columns);
    if constexpr (std::is_same_v<Row, NibbleRow>)
      return {reinterpret_cast<const uint8_t*>(data), static_cast<const uint8_t*>(w.scales) + row * (w.columns / 32)};
    else
      return {reinterpret_cast<decltype(Row::data)>(data)};
  }
  float scale(int64_t row) const {
    return w.type == Type::i8 || w.type == Type::f8 ? static_cast<const float*>(w.scales)[row] : 1.0f;
  }
};

// Calls body(first column, columns, units) for every chunk; the last unit may be a partial one.
template <typename O, typename Body>
inline void for_chunks(int64_t columns, const Body& body) {
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t width = columns - first < kChunkColumns ? columns - first : kChunkColumns;
    body(first, width, (width + kUnit<O> - 1) / kUnit<O>);
  }
}

template <typename O, typename Row>
inline void decode_unit(const Row& row, int64_t first, int64_t width, int64_t unit, typename O::Vector v[kStreams]) {
  const int64_t column = unit * kUnit<O>;
  if (__builtin_expect(column + kUnit<O> <= width, 1))
    row.template decode<O>(first + column, v);
  else
    row.template decode_some<O>(first + column, width - column, v);
}

template <typename O>
int64_t padded_elements(int64_t columns) {
  return (columns + kUnit<O> - 1) / kUnit<O> * kUnit<O>;
}

// Lays x out for O; with `nibbles` in the order in which packed weights are decoded.
template <typename O, typename E>
void pack_floats(const E* x, int64_t columns, bool nibbles, typename O::Element* to) {
  for_chunks<O>(columns, [&](int64_t first, int64_t width, int64_t units) {
    for (int64_t unit = 0; unit < units; ++unit) {
      typename O::Element ordered[kUnit<O>];
      for (int i = 0; i < kUnit<O>; ++i) {
        const int64_t column = unit * kUnit<O> + (nibbles ? i / 32 * 32 + O::kNibbleOrder[i % 32] : i);
        ordered[i] = column < width ? O::element(x[first + column]) : O::element(E{});
      }
      for (int s = 0; s < kStreams; ++s)
        O::store(to + first + (s * units + unit) * O::kStep, O::load(ordered + s * O::kStep));
    }
  });
}

// T activation rows times one weight row, which is read once, in one stream.
template <typename O, int T, typename Row>
void dot_few(const Row& row, int64_t columns, const typename O::Element* const* x, float scale, float* y,
             int64_t y_stride) {
  F totals[T];
  for (int t = 0; t < T; ++t) totals[t] = zero();
  for_chunks<O>(columns, [&](int64_t first, int64_t width, int64_t units) {
    F sums[T][kStreams];
    for (int t = 0; t < T; ++t)
      for (int s = 0; s < kStreams; ++s) sums[t][s] = zero();
    for (int64_t unit = 0; unit < units; ++unit) {
      typename O::Vector w[kStreams];
      decode_unit<O>(row, first, width, unit, w);
      for (int t = 0; t < T; ++t)
        for (int s = 0; s < kStreams; ++s)
          sums[t][s] = O::step(w[s], O::load(x[t] + first + (s * units + unit) * O::kStep), sums[t][s]);
    }
    for (int t = 0; t < T; ++t)
      for (int s = 0; s < kStreams; ++s) totals[t] = add(totals[t], sums[t][s]);
  });
  for (int t = 0; t < T; ++t) y[t * y_stride] = sum(totals[t]) * scale;
}

// One stream of R decoded rows times T activation rows, added to totals [R, kTokenTile].
template <typename O, int R, int T>
void dot_tile(const typename O::Element* w, int64_t w_stride, const typename O::Element* const* x, int64_t at,
              int64_t units, F* totals) {
  F sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = zero();
  const typename O::Element* tokens[T];
  for (int t = 0; t < T; ++t) tokens[t] = x[t] + at;
  for (int64_t i = 0; i < units * O::kStep; i += O::kStep) {
    typename O::Vector rows[R];
    for (int r = 0; r < R; ++r) rows[r] = O::load(w + r * w_stride + i);
    for (int t = 0; t < T; ++t) {
      const typename O::Vector token = O::load(tokens[t] + i);
      for (int r = 0; r < R; ++r) sums[r][t] = O::step(rows[r], token, sums[r][t]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) totals[r * kTokenTile + t] = add(totals[r * kTokenTile + t], sums[r][t]);
}

template <typename O>
struct DotTile {
  void (*call)(const typename O::Element*, int64_t, const typename O::Element* const*, int64_t, int64_t, F*);
};

template <typename O, size_t... I>
constexpr std::array<DotTile<O>, sizeof...(I)> make_dot_tiles(std::index_sequence<I...>) {
  return {DotTile<O>{dot_tile<O, I / kTokenTile + 1, I % kTokenTile + 1>}...};
}

template <typename O>
inline DotTile<O> tile_of(int64_t rows, int64_t tokens) {
  static constexpr auto kTiles = make_dot_tiles<O>(std::make_index_sequence<kRowTile * kTokenTile>{});
  return kTiles[(rows - 1) * kTokenTile + tokens - 1];
}

inline int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

// Rows that are decoded together.
template <typename O>
int64_t panel_rows(int64_t columns) {
  const int64_t bytes = at_most(padded_elements<O>(columns), kChunkColumns) * sizeof(typename O::Element);
  const int64_t rows = kPanelBytes / bytes / kRowTile * kRowTile;
  return rows < kRowTile ? kRowTile : at_most(rows, 16 * kRowTile);
}

// Rows [first, first + rows) of a panel times `count` activation rows.
template <typename O, typename Row>
void dot_panel(const Rows<Row>& weights, int64_t first_row, int64_t rows, const typename O::Element* const* x,
               int64_t count, typename O::Element* panel, F* totals, float* y, int64_t y_stride) {
  const int64_t columns = weights.w.columns, per_tile = rows * kTokenTile;
  const int64_t stride = (at_most(padded_elements<O>(columns), kChunkColumns) / O::kStep | 1) * O::kStep;
  const bool is_one_chunk = columns <= kChunkColumns;
  for_chunks<O>(columns, [&](int64_t first, int64_t width, int64_t units) {
    for (int64_t r = 0; r < rows; ++r) {
      const Row row = weights[first_row + r];
      for (int64_t unit = 0; unit < units; ++unit) {
        typename O::Vector v[kStreams];
        decode_unit<O>(row, first, width, unit, v);
        for (int s = 0; s < kStreams; ++s) O::store(panel + r * stride + (s * units + unit) * O::kStep, v[s]);
      }
    }
    for (int64_t token = 0; token < count; token += kTokenTile) {
      const int64_t tokens = at_most(count - token, kTokenTile);
      F* own = totals + (is_one_chunk ? 0 : token / kTokenTile * per_tile);
      if (first == 0) std::fill_n(own, per_tile, zero());
      for (int s = 0; s < kStreams; ++s)
        for (int64_t r = 0; r < rows; r += kRowTile)
          tile_of<O>(at_most(rows - r, kRowTile), tokens).call(panel + r * stride + s * units * O::kStep, stride, x + token,
                                                          first + s * units * O::kStep, units, own + r * kTokenTile);
      if (first + width < columns) continue;
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < rows; ++r)
          y[(token + t) * y_stride + r] = sum(own[r * kTokenTile + t]) * weights.scale(first_row + r);
    }
  });
}

template <typename O, typename Row>
void dot_float(const Matrix& w, int64_t first, int64_t last, const typename O::Element* const* x, int64_t count,
               float* y, int64_t y_stride) {
  const Rows<Row> weights{w};
  if (count <= kFewTokens) {
    constexpr decltype(&dot_few<O, 1, Row>) kFew[] = {dot_few<O, 1, Row>, dot_few<O, 2, Row>, dot_few<O, 3, Row>};
    for (int64_t row = first; row < last; ++row)
      kFew[count - 1](weights[row], w.columns, x, weights.scale(row), y + row - first, y_stride);
    return;
  }
  Scratch scratch;
  const int64_t rows = at_most(panel_rows<O>(w.columns), last - first), tiles = (count + kTokenTile - 1) / kTokenTile;
  const int64_t stride = at_most(padded_elements<O>(w.columns), kChunkColumns) + O::kStep;
  auto* panel = scratch.take<typename O::Element>(rows * stride);
  auto* totals = scratch.take<F>(rows * kTokenTile * (w.columns <= kChunkColumns ? 1 : tiles));
  for (int64_t row = first; row < last; row += rows)
    dot_panel<O>(weights, row, at_most(last - row, rows), x, count, panel, totals, y + row - first, y_stride);
}

}  // namespace perilune::PERILUNE_ISA
