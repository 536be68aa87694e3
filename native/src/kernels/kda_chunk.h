// The gated delta rule over chunks of rows, as matrix products on a state that stays in the cache.
//
// Rows i of a chunk, G the log decay from the chunk's start to each row, S the state before the chunk:
//   KK[i, j] = sum_d k_i k_j exp(G_i - G_j), j < i;  QK[i, j] = sum_d q_i k_j exp(G_i - G_j), j <= i
//   C_i = beta_i (v_i - (exp(G_i) k_i)^T S - sum_j KK[i, j] C_j)
//   o_i = (exp(G_i) q_i)^T S + sum_j QK[i, j] C_j
//   S <- diag(exp(G_last)) S + sum_i (exp(G_last - G_i) k_i) C_i^T
// All of it but KK and QK is independent per column of S, so the state lies in panels of a few columns, and a chunk
// finishes one panel after the other in the first-level cache.
#pragma once

#include <initializer_list>

#include "kernels/kda.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kChunkRows = 16;
// Decays are formed relative to this row: with log decays above -5 they stay within exp(+-45), safe in float32.
constexpr int64_t kMiddleRow = 7;

// Floats from row to row of a chunk's buffers: rows a power of two apart would share a few sets of the cache.
constexpr int64_t row_stride(int64_t width) { return width + 16; }

// What one thread needs for a head's chunks; rows are `width` floats, row_stride(width) apart.
struct ChunkBuffers {
  float *q, *k, *v, *decay, *o;  // [kChunkRows, width]: the chunk's rows, and its results
  float* beta;                   // [kChunkRows]
  float* late_k;                 // [kChunkRows, width]: k exp(G - G_middle)
  float* late_q;                 // the same for q
  float* early;                  // [kChunkRows, width]: k exp(G_middle - G)
  float* inward;                 // [2 rows, width]: k exp(G), then q exp(G)
  float* outward;                // [kChunkRows, width]: k exp(G_last - G)
  float* decay_all;              // [width]: exp(G_last)
  float *kk, *qk;                // [kChunkRows, kChunkRows]
  float *product, *correction;   // [2 kChunkRows, panel], [kChunkRows, panel]
  float* panels;                 // [width / panel, width(key), panel]: the state

  ChunkBuffers(Scratch& scratch, int64_t width) {
    const int64_t rows = kChunkRows * row_stride(width);
    for (float** each : {&q, &k, &v, &decay, &o, &late_k, &late_q, &early, &outward}) *each = scratch.take<float>(rows);
    inward = scratch.take<float>(2 * rows);
    beta = scratch.take<float>(kChunkRows);
    decay_all = scratch.take<float>(width);
    kk = scratch.take<float>(kChunkRows * kChunkRows);
    qk = scratch.take<float>(kChunkRows * kChunkRows);
    product = scratch.take<float>(2 * kChunkRows * 2 * kLanes);
    correction = scratch.take<float>(kChunkRows * 2 * kLanes);
    panels = scratch.take<float>(width * width);
  }
};

// The matrix products take rows in tiles of this many: with two vectors a row enough sums to hide an addition's latency.
constexpr int64_t kChunkTileRows = 4;
constexpr int64_t tiled_rows(int64_t rows) { return (rows + kChunkTileRows - 1) / kChunkTileRows * kChunkTileRows; }

// The chunk's rows times their decays. Running products of each row's own decay, so that nothing is ever the difference
// of two large sums. Rows that fill up a tile are zero.
template <int64_t W>
void scale_rows(const ChunkBuffers& buffers, int64_t rows, int64_t width_given) {
  const ChunkBuffers b = buffers;  // the compiler reloads what a store might change
  const int64_t width = W > 0 ? W : width_given, stride = row_stride(width);
  const int64_t middle = rows - 1 < kMiddleRow ? rows - 1 : kMiddleRow;
  float* inward_q = b.inward + tiled_rows(rows) * stride;
  for (int64_t c = 0; c < width; c += kLanes) {
    F late[kChunkRows], early[kChunkRows];
    late[middle] = early[middle] = set(1.0f);
    for (int64_t i = middle - 1; i >= 0; --i) {
      early[i] = mul(early[i + 1], load(b.decay + (i + 1) * stride + c));
      late[i] = div(set(1.0f), early[i]);
    }
    for (int64_t i = middle + 1; i < rows; ++i) {
      late[i] = mul(late[i - 1], load(b.decay + i * stride + c));
      early[i] = div(set(1.0f), late[i]);
    }
    const F to_middle = mul(early[0], load(b.decay + c)), from_middle = late[rows - 1];
    store(b.decay_all + c, mul(to_middle, from_middle));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * stride + c;
      const F k = load(b.k + at), late_k = mul(k, late[i]), late_q = mul(load(b.q + at), late[i]);
      const F early_k = mul(k, early[i]);
      store(b.late_k + at, late_k);
      store(b.late_q + at, late_q);
      store(b.early + at, early_k);
      store(b.inward + at, mul(late_k, to_middle));
      store(inward_q + at, mul(late_q, to_middle));
      store(b.outward + at, mul(early_k, from_middle));
    }
    for (int64_t i = rows; i < tiled_rows(rows); ++i)
      for (float* each : {b.late_k, b.late_q, b.early, b.inward, inward_q}) store(each + i * stride + c, zero());
  }
}

// out[i, j] = a_i . b_j for j <= i, [rows, kChunkRows]; some entries above the diagonal are written too.
template <int64_t W>
void lower_products(const float* a, const float* b, int64_t rows, int64_t width_given, float* out) {
  const int64_t width = W > 0 ? W : width_given, stride = row_stride(width);
  for (int64_t first = 0; first < rows; first += kChunkTileRows) {
    for (int64_t j = 0; j < first + kChunkTileRows; j += 2) {
      F total[kChunkTileRows][2];
      for (auto& pair : total) pair[0] = pair[1] = zero();
      for (int64_t c = 0; c < width; c += kLanes) {
        const F b0 = load(b + j * stride + c), b1 = load(b + (j + 1) * stride + c);
        for (int r = 0; r < kChunkTileRows; ++r) {
          const F x = load(a + (first + r) * stride + c);
          total[r][0] = fma(x, b0, total[r][0]);
          total[r][1] = fma(x, b1, total[r][1]);
        }
      }
      for (int r = 0; r < kChunkTileRows; ++r) {
        out[(first + r) * kChunkRows + j] = sum(total[r][0]);
        out[(first + r) * kChunkRows + j + 1] = sum(total[r][1]);
      }
    }
  }
}

// product [count, V vectors] = rows [count, width] * panel [width, V vectors]; count a multiple of a tile.
template <int64_t W, int V>
void times_panel(const float* rows, int64_t count, int64_t width_given, const float* panel, float* product) {
  const int64_t width = W > 0 ? W : width_given, stride = row_stride(width);
  for (int64_t first = 0; first < count; first += kChunkTileRows) {
    const float* x = rows + first * stride;
    F total[kChunkTileRows][V];
    for (auto& row : total)
      for (F& each : row) each = zero();
#pragma GCC unroll 4
    for (int64_t d = 0; d < width; ++d) {
      F s[V];
      for (int u = 0; u < V; ++u) s[u] = load(panel + (d * V + u) * kLanes);
      for (int r = 0; r < kChunkTileRows; ++r)
        for (int u = 0; u < V; ++u) total[r][u] = fma(set(x[r * stride + d]), s[u], total[r][u]);
    }
    for (int r = 0; r < kChunkTileRows; ++r)
      for (int u = 0; u < V; ++u) store(product + ((first + r) * V + u) * kLanes, total[r][u]);
  }
}

// Corrections and results of a chunk in the panel's columns, which start at `column`.
template <int V>
void solve_panel(const ChunkBuffers& b, int64_t rows, int64_t width, int64_t column) {
  const int64_t stride = row_stride(width);
  const float* inner_q = b.product + tiled_rows(rows) * V * kLanes;
  for (int64_t i = 0; i < rows; ++i) {
    F taken[V], o[V];
    for (int u = 0; u < V; ++u) {
      taken[u] = load(b.product + (i * V + u) * kLanes);
      o[u] = load(inner_q + (i * V + u) * kLanes);
    }
    for (int64_t j = 0; j < i; ++j) {
      const F kk = set(b.kk[i * kChunkRows + j]), qk = set(b.qk[i * kChunkRows + j]);
      for (int u = 0; u < V; ++u) {
        const F correction = load(b.correction + (j * V + u) * kLanes);
        taken[u] = fma(kk, correction, taken[u]);
        o[u] = fma(qk, correction, o[u]);
      }
    }
    for (int u = 0; u < V; ++u) {
      const int64_t at = i * stride + column + u * kLanes;
      const F correction = mul(set(b.beta[i]), sub(load(b.v + at), taken[u]));
      store(b.correction + (i * V + u) * kLanes, correction);
      store(b.o + at, fma(set(b.qk[i * kChunkRows + i]), correction, o[u]));
    }
  }
}

// panel [width, V vectors] <- diag(decay_all) panel + outward [rows, width]^T correction [rows, V vectors]
template <int64_t W, int V>
void update_panel(const float* decay_all, const float* outward, const float* correction, int64_t rows,
                  int64_t width_given, float* panel) {
  const int64_t width = W > 0 ? W : width_given, stride = row_stride(width);
  for (int64_t first = 0; first < width; first += kChunkTileRows) {
    float* s = panel + first * V * kLanes;
    F total[kChunkTileRows][V];
    for (int r = 0; r < kChunkTileRows; ++r)
      for (int u = 0; u < V; ++u) total[r][u] = mul(set(decay_all[first + r]), load(s + (r * V + u) * kLanes));
    for (int64_t i = 0; i < rows; ++i) {
      F change[V];
      for (int u = 0; u < V; ++u) change[u] = load(correction + (i * V + u) * kLanes);
      for (int r = 0; r < kChunkTileRows; ++r)
        for (int u = 0; u < V; ++u) total[r][u] = fma(set(outward[i * stride + first + r]), change[u], total[r][u]);
    }
    for (int r = 0; r < kChunkTileRows; ++r)
      for (int u = 0; u < V; ++u) store(s + (r * V + u) * kLanes, total[r][u]);
  }
}

// Vectors of a panel's rows: two where the width allows.
inline int64_t panel_vectors(int64_t width) { return width % (2 * kLanes) == 0 ? 2 : 1; }

// A chunk of `rows` rows: takes q, k, v, decay, beta and the state from the buffers, leaves o and the state there.
template <int64_t W, int V>
void delta_chunk(const ChunkBuffers& b, int64_t rows, int64_t width) {
  scale_rows<W>(b, rows, width);
  lower_products<W>(b.late_k, b.early, rows, width, b.kk);
  lower_products<W>(b.late_q, b.early, rows, width, b.qk);
  for (int64_t column = 0; column < width; column += V * kLanes) {
    float* panel = b.panels + column * width;
    times_panel<W, V>(b.inward, 2 * tiled_rows(rows), width, panel, b.product);
    solve_panel<V>(b, rows, width, column);
    update_panel<W, V>(b.decay_all, b.outward, b.correction, rows, width, panel);
  }
}

// state [width, width] (zero where null) into panels, and back.
inline void load_panels(const float* state, int64_t width, float* panels) {
  if (state == nullptr) {
    std::memset(panels, 0, sizeof(float) * width * width);
    return;
  }
  const int64_t columns = panel_vectors(width) * kLanes;
  for (int64_t d = 0; d < width; ++d)
    for (int64_t c = 0; c < width; c += kLanes)
      store(panels + (c / columns * width + d) * columns + c % columns, load(state + d * width + c));
}
inline void store_panels(const float* panels, int64_t width, float* state) {
  if (state == nullptr) return;
  const int64_t columns = panel_vectors(width) * kLanes;
  for (int64_t d = 0; d < width; ++d)
    for (int64_t c = 0; c < width; c += kLanes)
      store(state + d * width + c, load(panels + (c / columns * width + d) * columns + c % columns));
}

// Calls body with the head width and the panel's vectors as constants.
template <typename Body>
void with_chunk_form(int64_t width, const Body& body) {
  with_width(width, [&](auto constant) {
    if (panel_vectors(width) == 2)
      body(constant, std::integral_constant<int, 2>());
    else
      body(constant, std::integral_constant<int, 1>());
  });
}

// Chunks of the pool are (sequence, head); chunks of rows count from the sequence's first token of the call.
inline void kda_chunk(const KdaArgs& args) {
  const int64_t width = args.width;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    with_chunk_form(width, [&](auto constant, auto vectors) {
      parallel(args.sequences.count * args.heads, [&](int64_t chunk) {
        const int64_t n = chunk / args.heads, head = chunk % args.heads, end = args.sequences.cu_seqlens[n + 1];
        const HeadInputs<E> inputs{args, head};
        float* state = state_of(args.state, args.sequences, n, args.heads, head, width);
        Scratch scratch;
        const ChunkBuffers b(scratch, width);
        load_panels(state, width, b.panels);
        for (int64_t t = args.sequences.cu_seqlens[n]; t < end; t += kChunkRows) {
          const int64_t rows = end - t < kChunkRows ? end - t : kChunkRows;
          for (int64_t i = 0; i < rows; ++i) {
            const int64_t at = i * row_stride(width);
            inputs.load_row(t + i, b.q + at, b.k + at, b.v + at, b.decay + at);
            b.beta[i] = inputs.beta(t + i);
          }
          delta_chunk<decltype(constant)::value, decltype(vectors)::value>(b, rows, width);
          for (int64_t i = 0; i < rows; ++i) inputs.store_row(t + i, b.o + i * row_stride(width));
        }
        store_panels(b.panels, width, state);
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
