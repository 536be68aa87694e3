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

#include "kernels/ahead.h"
#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kChunkColumns = 4096;
constexpr int kStreams = 4;
// A panel of decoded weight rows stays in the second cache, beside the activations of a register tile.
constexpr int64_t kPanelBytes = 288 << 10;
// Activation rows from which on so large a panel saves more than it takes to wait for its weights.
constexpr int64_t kPanelTokens = 64;
// Weight rows whose sums few activation rows finish together.
constexpr int kFewRows = 16;
constexpr int64_t kAskedBytes = 128;

inline int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

// Float32 vectors, multiplied and added in float32.
struct Floats {
  using Element = float;
  using Vector = F;
  static constexpr int kStep = kLanes;  // columns of a vector
  // Column of place i of a unit in the order in which nibbles are decoded.
  static constexpr int nibble_column(int i) { return i / 32 * 32 + kFloatNibbleOrder[i % 32]; }
  static Vector load(const float* p) { return PERILUNE_ISA::load(p); }
  static void store(float* p, Vector v) { PERILUNE_ISA::store(p, v); }
  static float element(float x) { return x; }
  static float element(bf16 x) { return widen(x); }
  static F step(Vector w, Vector x, F total) { return fma(w, x, total); }
};

template <typename O>
constexpr int kUnit = kStreams * O::kStep;

template <typename O, typename E>
inline void load_unit(O, const E* p, typename O::Vector v[kStreams]) {
  for (int s = 0; s < kStreams; ++s) load_weights(p + s * O::kStep, v[s]);
}

// A row of weights that lie element by element.
template <typename E>
struct ElementRow {
  const E* data;

  static constexpr bool kIsDecoded = sizeof(E) == 1, kReadsSlowly = false;
  template <typename O>
  static constexpr int64_t bytes() {  // of a unit
    return kUnit<O> * sizeof(E);
  }
  template <typename O>
  void decode(int64_t column, typename O::Vector v[kStreams]) const {
    load_unit(O(), data + column, v);
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

  static constexpr bool kIsDecoded = true, kReadsSlowly = true;
  template <typename O>
  static constexpr int64_t bytes() {
    return kUnit<O> / 2;
  }
  template <typename O>
  void decode(int64_t column, typename O::Vector v[kStreams]) const {
    decode_nibbles(data + column / 2, scales + column / 32, v);
  }
  template <typename O>
  void decode_some(int64_t column, int64_t count, typename O::Vector v[kStreams]) const {
    uint8_t padded[kUnit<O> / 2] = {}, padded_scales[kUnit<O> / 32];
    std::memcpy(padded, data + column / 2, count / 2);
    std::memset(padded_scales, 127, sizeof(padded_scales));
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
      typename O::Element own[kUnit<O>], ordered[kUnit<O>];
      const int64_t column = first + unit * kUnit<O>, count = at_most(width - unit * kUnit<O>, kUnit<O>);
      for (int64_t i = 0; i < count; ++i) own[i] = O::element(x[column + i]);
      for (int64_t i = count; i < kUnit<O>; ++i) own[i] = O::element(E{});
      for (int i = 0; i < kUnit<O>; ++i) ordered[i] = own[nibbles ? O::nibble_column(i) : i];
      for (int s = 0; s < kStreams; ++s)
        O::store(to + first + (s * units + unit) * O::kStep, O::load(ordered + s * O::kStep));
    }
  });
}

// Calls body(0) to body(N - 1), each with a constant: arrays that are indexed so stay in registers.
template <typename Body, int... I>
[[gnu::always_inline]] inline void each(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, typename Body>
[[gnu::always_inline]] inline void each(const Body& body) {
  each(body, std::make_integer_sequence<int, N>{});
}

// A chunk of R weight rows times the same chunk of T activation rows, stream by stream, added to their totals [R, T];
// meanwhile `next` is asked for.
template <typename O, int T, int R, typename Row>
[[gnu::always_inline]] inline void add_chunk(const Row* rows, int64_t first, int64_t width, int64_t units,
                                             const typename O::Element* const* x, F* totals, Ahead& next) {
  F sums[R * T * kStreams];
  each<R * T * kStreams>([&](auto i) { sums[i] = zero(); });
  const auto add_unit = [&](auto row, int64_t unit, const typename O::Vector* w) __attribute__((always_inline)) {
    each<T * kStreams>([&](auto i) {
      constexpr int t = i / kStreams, s = i % kStreams;
      F& sum = sums[row() * T * kStreams + i];
      sum = O::step(w[s], O::load(x[t] + first + (s * units + unit) * O::kStep), sum);
    });
  };
  const int64_t whole = width / kUnit<O>;
  for (int64_t unit = 0; unit < whole; ++unit) {
    if constexpr (R > 1) next.ask(R * Row::template bytes<O>());
    each<R>([&](auto r) {
      typename O::Vector w[kStreams];
      rows[r].template decode<O>(first + unit * kUnit<O>, w);
      add_unit(r, unit, w);
    });
  }
  if (whole < units)
    each<R>([&](auto r) {
      typename O::Vector w[kStreams];
      rows[r].template decode_some<O>(first + whole * kUnit<O>, width - whole * kUnit<O>, w);
      add_unit(r, whole, w);
    });
  each<R * T * kStreams>([&](auto i) { totals[i / kStreams] = add(totals[i / kStreams], sums[i]); });
}

// T activation rows times R weight rows from `row` on; totals [R, T]. A row is read once, from end to end: in pieces,
// beside which the activations of a chunk would stay in the first cache, memory is read at half the speed.
template <typename O, int T, int R, typename Row>
void dot_together(const Rows<Row>& weights, int64_t row, const typename O::Element* const* x, F* totals) {
  Row rows[R];
  for (int r = 0; r < R; ++r) rows[r] = weights[row + r];
  // so far ahead that it comes in time and is not gone again
  const int64_t rows_ahead = Row::kReadsSlowly ? 2 * R : R, last = weights.w.rows;
  Ahead next(weights.w, at_most(row + rows_ahead, last), at_most(row + rows_ahead + R, last));
  for_chunks<O>(weights.w.columns, [&](int64_t first, int64_t width, int64_t units) {
    add_chunk<O, T, R>(rows, first, width, units, x, totals, next);
  });
}

// Activations that leave a stream of wide weights enough room in the first cache.
constexpr int64_t kSmallActivations = 16 << 10;

// T activation rows times weight rows [first_row, first_row + rows).
template <typename O, int T, typename Row>
void dot_few(const Rows<Row>& weights, int64_t first_row, int64_t rows, const typename O::Element* const* x, float* y,
             int64_t y_stride) {
  constexpr int kTogether = kReadsTogether && !std::is_same_v<O, Floats> ? (Row::kReadsSlowly ? 2 : 4 / T) : 1;
  F totals[kFewRows * T];
  for (int i = 0; i < kFewRows * T; ++i) totals[i] = zero();
  int64_t r = 0;
  if constexpr (kTogether > 1) {
    const int64_t activations = T * weights.w.columns * static_cast<int64_t>(sizeof(typename O::Element));
    if (Row::kIsDecoded || activations > kSmallActivations)
      for (; r + kTogether <= rows; r += kTogether)
        dot_together<O, T, kTogether>(weights, first_row + r, x, totals + r * T);
  }
  for (; r < rows; ++r) dot_together<O, T, 1>(weights, first_row + r, x, totals + r * T);
  float sums[kFewRows * T];
  sum_all(totals, kFewRows * T, sums);
  for (int64_t r = 0; r < rows; ++r)
    for (int t = 0; t < T; ++t) y[t * y_stride + r] = sums[r * T + t] * weights.scale(first_row + r);
}

template <typename O, typename Row>
struct DotFew {
  void (*call)(const Rows<Row>&, int64_t, int64_t, const typename O::Element* const*, float*, int64_t);
};

template <typename O, typename Row, size_t... I>
constexpr std::array<DotFew<O, Row>, sizeof...(I)> make_dot_few(std::index_sequence<I...>) {
  return {DotFew<O, Row>{dot_few<O, I + 1, Row>}...};
}

// A chunk of R decoded rows times T activation rows, stream by stream, added to totals [R, kTokenTile]; meanwhile `next`
// is asked for.
template <typename O, int R, int T>
void dot_tile(const typename O::Element* w, int64_t w_stride, const typename O::Element* const* x, int64_t at,
              int64_t units, F* totals, Ahead& next) {
  const typename O::Element* tokens[T];
  for (int t = 0; t < T; ++t) tokens[t] = x[t] + at;
  for (int s = 0; s < kStreams; ++s) {
    F sums[R * T];
    each<R * T>([&](auto i) { sums[i] = zero(); });
    const int64_t last = (s + 1) * units * O::kStep;
    for (int64_t i = s * units * O::kStep; i < last; i += O::kStep) {
      next.ask(kAskedBytes);
      typename O::Vector rows[R];
      each<R>([&](auto r) { rows[r] = O::load(w + r * w_stride + i); });
      each<T>([&](auto t) {
        const typename O::Vector token = O::load(tokens[t] + i);
        each<R>([&](auto r) { sums[r * T + t] = O::step(rows[r], token, sums[r * T + t]); });
      });
    }
    each<R * T>([&](auto i) {
      F& total = totals[i / T * kTokenTile + i % T];
      total = add(total, sums[i]);
    });
  }
}

template <typename O>
struct DotTile {
  void (*call)(const typename O::Element*, int64_t, const typename O::Element* const*, int64_t, int64_t, F*, Ahead&);
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

// Rows that are decoded together.
template <typename O>
int64_t panel_rows(int64_t columns, int64_t count) {
  if (count < kPanelTokens) return 4 * kRowTile;
  const int64_t bytes = at_most(padded_elements<O>(columns), kChunkColumns) * sizeof(typename O::Element);
  const int64_t rows = kPanelBytes / bytes / kRowTile * kRowTile;
  return rows < kRowTile ? kRowTile : at_most(rows, 16 * kRowTile);
}

// Rows [first, first + rows) of a panel times `count` activation rows.
template <typename O, typename Row>
void dot_panel(const Rows<Row>& weights, int64_t first_row, int64_t rows, const typename O::Element* const* x,
               int64_t count, typename O::Element* panel, F* totals, float* sums, float* y, int64_t y_stride,
               Ahead& next) {
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
      for (int64_t r = 0; r < rows; r += kRowTile)
        tile_of<O>(at_most(rows - r, kRowTile), tokens)
            .call(panel + r * stride, stride, x + token, first, units, own + r * kTokenTile, next);
      if (first + width < columns) continue;
      sum_all(own, per_tile, sums);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < rows; ++r)
          y[(token + t) * y_stride + r] = sums[r * kTokenTile + t] * weights.scale(first_row + r);
    }
  });
}

template <typename O, typename Row>
void dot_float(const Matrix& w, int64_t first, int64_t last, const typename O::Element* const* x, int64_t count,
               float* y, int64_t y_stride) {
  const Rows<Row> weights{w};
  if (count <= kFewTokens) {
    static constexpr auto kFew = make_dot_few<O, Row>(std::make_index_sequence<kFewTokens>{});
    for (int64_t row = first; row < last; row += kFewRows)
      kFew[count - 1].call(weights, row, at_most(last - row, kFewRows), x, y + row - first, y_stride);
    return;
  }
  Scratch scratch;
  const int64_t rows = at_most(panel_rows<O>(w.columns, count), last - first), tiles = (count + kTokenTile - 1) / kTokenTile;
  const int64_t stride = at_most(padded_elements<O>(w.columns), kChunkColumns) + O::kStep;
  auto* panel = scratch.take<typename O::Element>(rows * stride);
  auto* totals = scratch.take<F>(rows * kTokenTile * (w.columns <= kChunkColumns ? 1 : tiles));
  auto* sums = scratch.take<float>(rows * kTokenTile);
  for (int64_t row = first; row < last; row += rows) {
    Ahead next(w, at_most(row + rows, last), at_most(row + 2 * rows, last));
    dot_panel<O>(weights, row, at_most(last - row, rows), x, count, panel, totals, sums, y + row - first, y_stride,
                 next);
  }
}

}  // namespace perilune::PERILUNE_ISA
