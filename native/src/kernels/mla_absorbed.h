// Latent attention in absorbed form: queries are brought into the latent space, where all heads share one key and value.
#pragma once

#include <algorithm>

#include "kernels/attention_block.h"
#include "kernels/packed_rows.h"

namespace perilune::PERILUNE_ISA {

// Partial sums of one pass over the queries; more queries than fit take several passes.
constexpr int64_t kPartialBytes = int64_t{32} << 20;
constexpr int64_t kMostRanges = 32;

// A query's rows are attended to in ranges of this many, each from scratch, and merged in order: so one long sequence
// keeps many threads busy, and the division depends on nothing but the number of rows.
inline int64_t range_rows(int64_t count) {
  int64_t rows = 8 * kKeyBlock;
  while (rows * kMostRanges < count) rows *= 2;
  return rows;
}
inline int64_t num_ranges(int64_t count) { return (count + range_rows(count) - 1) / range_rows(count); }

// One pass: queries with their latent form, and a partial sum for each of their ranges.
template <typename V>
struct AbsorbedPass {
  const Query* queries;
  int64_t count;
  const int64_t* first_partial;  // [count + 1]
  V* latent_q;                   // [count, heads, latent + shared]
  float* peaks;                  // [partials, padded heads]
  float* totals;                 // [partials, padded heads]
  float* contexts;               // [partials, heads * latent], strips of a group of heads after those of another
  int64_t group;                 // heads of a group; which are grouped changes no result
};

template <typename E>
const E* query_head(const MlaArgs& args, int64_t token, int64_t head) {
  return static_cast<const E*>(args.q) + token * args.q_stride + head * (args.key + args.shared);
}

// One stream of weights per core reads memory fastest; for so many queries arithmetic outweighs reading.
constexpr int64_t kManyQueries = 6;

constexpr int64_t kAheadBytes = 2048;

// out[i] = sum over d of q[i][d] weight[d], in the order of d: weights pass once, from front to back.
template <typename E>
void stream_rows(const E* weight, int64_t depth, int64_t columns, const float* q, int64_t count, float* out,
                 int64_t out_row) {
  for (int64_t i = 0; i < count; ++i) std::fill_n(out + i * out_row, columns, 0.0f);
  for (int64_t d = 0; d < depth; ++d, weight += columns)
    for_panels(columns, [&](auto vectors, int64_t c) {
      constexpr int kVectors = vectors();
      prefetch(reinterpret_cast<const char*>(weight + c) + kAheadBytes);
      F own[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) own[v] = load(weight + c + v * kLanes);
      for (int64_t i = 0; i < count; ++i) {
        float* at = out + i * out_row + c;
        const F shared = set(q[i * depth + d]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) store(at + v * kLanes, fma(shared, own[v], load(at + v * kLanes)));
      }
    });
}

// The same sums, tile by tile.
inline void multiply_rows(const float* weight, int64_t depth, int64_t columns, const float* q, int64_t count,
                          float* out, int64_t out_row) {
  for_panels(columns, [&](auto vectors, int64_t column) {
    constexpr int kVectors = vectors();
    for_tiles<kTileRows>(count, [&](auto rows, int64_t first) {
      Sums<rows(), kVectors> sums;
      for_sums(sums, [](F& sum, int, int) { sum = zero(); });
      multiply(q + first * depth, depth, 1, weight + column, columns, kLanes, depth, sums);
      for_sums(sums, [&](F& sum, int r, int v) { store(out + (first + r) * out_row + column + v * kLanes, sum); });
    });
  });
}

// latent_q[head] = w_uk[head]^T q, rounded to E, then q's shared part.
template <typename E, typename V>
void absorb_queries(const MlaArgs& args, const AbsorbedPass<V>& pass, int64_t head) {
  Scratch scratch;
  auto* q = scratch.take<float>(pass.count * args.key);
  auto* sums = scratch.take<float>(pass.count * args.latent);
  const int64_t width = args.latent + args.shared, row = args.heads * width;
  V* out = pass.latent_q + head * width;
  for (int64_t i = 0; i < pass.count; ++i) {
    const E* own = query_head<E>(args, pass.queries[i].token, head);
    for (int64_t d = 0; d < args.key; d += kLanes) store(q + i * args.key + d, load(own + d));
    for (int64_t d = 0; d < args.shared; d += kLanes) store(out + i * row + args.latent + d, load(own + args.key + d));
  }
  const E* weight = static_cast<const E*>(args.w_uk) + head * args.uk_stride;
  if (pass.count < kManyQueries) {
    stream_rows(weight, args.key, args.latent, q, pass.count, sums, args.latent);
  } else {
    auto* floats = scratch.take<float>(args.key * args.latent);
    for (int64_t at = 0; at < args.key * args.latent; at += kLanes) {
      prefetch(reinterpret_cast<const char*>(weight + at) + kAheadBytes);
      store(floats + at, load(weight + at));
    }
    multiply_rows(floats, args.key, args.latent, q, pass.count, sums, args.latent);
  }
  for (int64_t i = 0; i < pass.count; ++i)
    for (int64_t c = 0; c < args.latent; c += kLanes)
      store(out + i * row + c, round_to<E>(load(sums + i * args.latent + c)));
}

// Attends with the group of heads from first_head on of query i to its range `range`.
template <typename V>
void attend_range(const MlaArgs& args, const AbsorbedPass<V>& pass, int64_t i, int64_t range, int64_t first_head) {
  const Query& query = pass.queries[i];
  const int64_t width = args.latent + args.shared, count = std::min(pass.group, args.heads - first_head);
  const int64_t padded = round_up(count, kLanes);
  const int64_t partial = pass.first_partial[i] + range, all = round_up(args.heads, kLanes);
  Scratch scratch;
  const int64_t depth = row_cells<V>(width);
  Lanes<V> lanes = {count, padded, width, args.latent, args.scale, scratch.take<V>(depth * kCellValues<V> * padded),
                 pass.peaks + partial * all + first_head, pass.totals + partial * all + first_head,
                 pass.contexts + (partial * args.heads + first_head) * args.latent, nullptr};
  pack_panels(pass.latent_q + (i * args.heads + first_head) * width, count, width, width, lanes.q);
  begin(lanes);
  auto* keys = scratch.take<V>(depth * kCellValues<V> * kBlockRows);
  V* values = keys;
  if constexpr (kIsPaired<V>) values = scratch.take<V>(args.latent * kCellValues<V> * kBlockCells<V>);
  const int64_t start = range * range_rows(query.count);
  const int64_t end = std::min(start + range_rows(query.count), query.count);
  const void *rows[kKeyBlock], *next[kKeyBlock];
  const auto find = [&](int64_t first, const void** found) {
    return find_rows(args.pages, query.sequence, query.positions, first, end, kKeyBlock, found);
  };
  int64_t size = find(start, rows);
  for (int64_t first = start; first < end; first += kKeyBlock) {
    read_rows({args.row_type, args.latent, width}, rows, size, keys, kBlockRows);
    if constexpr (kIsPaired<V>) pair_rows(keys, kBlockRows, size, args.latent, values, kBlockCells<V>);
    const int64_t next_size = find(first + kKeyBlock, next);
    attend(lanes, keys, values, first, size, {next, next_size, args.pages.row_bytes});
    std::copy_n(next, size = next_size, rows);
  }
}

// The context [latent] of one query and head, rounded to E: its ranges in order, each shrunk to the common peak.
template <typename E, typename V>
void merge_ranges(const MlaArgs& args, const AbsorbedPass<V>& pass, int64_t i, int64_t head, float* out) {
  const int64_t first = pass.first_partial[i], end = pass.first_partial[i + 1], all = round_up(args.heads, kLanes);
  const int64_t first_head = head / pass.group * pass.group, count = std::min(pass.group, args.heads - first_head);
  float peak = -FLT_MAX, total = 0.0f;
  for (int64_t p = first; p < end; ++p) peak = pass.peaks[p * all + head] > peak ? pass.peaks[p * all + head] : peak;
  float shares[kMostRanges];
  for (int64_t p = first; p < end; ++p) {
    float shrunk[kLanes];
    store(shrunk, exp(set(pass.peaks[p * all + head] - peak)));
    shares[p - first] = shrunk[0];
    total += shrunk[0] * pass.totals[p * all + head];
  }
  for (int64_t c = 0; c < args.latent; c += kLanes) {
    const int64_t at = c / kStrip * kStrip * count + (head - first_head) * kStrip + c % kStrip;
    F sum = zero();
    for (int64_t p = first; p < end; ++p)
      sum = fma(set(shares[p - first]), load(pass.contexts + (p * args.heads + first_head) * args.latent + at), sum);
    store(out + c, round_to<E>(div(sum, set(total))));
  }
}

// o[r][c] = weight[r] . x[c] over `depth`, for tiles of weight rows and of queries.
template <typename E, int kRows, int kColumns, typename Put>
[[gnu::always_inline]] inline void dots(const E* weight, const float* x, int64_t depth, const Put& put) {
  Sums<kRows, kColumns> sums;
  for_sums(sums, [](F& sum, int, int) { sum = zero(); });
  for_panels(depth, [&](auto vectors, int64_t first) {
    constexpr int64_t kWidth = vectors() * kLanes;
#pragma GCC unroll 2
    for (int64_t k = first; k < first + kWidth; k += kLanes) {
      F own[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) own[r] = load(weight + r * depth + k);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const F shared = load(x + c * depth + k);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums.v[r][c] = fma(own[r], shared, sums.v[r][c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) prefetch(reinterpret_cast<const char*>(weight + r * depth + first) + kAheadBytes);
  });
  for_sums(sums, [&](F& total, int r, int c) { put(r, c, sum(total)); });
}

// o[head] = w_uv[head] context for all queries of the pass.
template <typename E, typename V>
void expand_contexts(const MlaArgs& args, const AbsorbedPass<V>& pass, int64_t head) {
  Scratch scratch;
  auto* contexts = scratch.take<float>(pass.count * args.latent);
  for (int64_t i = 0; i < pass.count; ++i) merge_ranges<E>(args, pass, i, head, contexts + i * args.latent);
  const E* weight = static_cast<const E*>(args.w_uv) + head * args.uv_stride;
  E* o = static_cast<E*>(args.o) + head * args.value;
  const auto multiply_tiles = [&](auto most_rows) {
    for_tiles<most_rows()>(args.value, [&](auto rows, int64_t row) {
      constexpr int kRows = rows();
      for_tiles<4>(pass.count, [&](auto columns, int64_t first) {
        dots<E, kRows, columns()>(weight + row * args.latent, contexts + first * args.latent, args.latent,
                                  [&](int r, int c, float sum) {
                                    const int64_t token = pass.queries[first + c].token;
                                    o[token * args.heads * args.value + row + r] = narrow<E>(sum);
                                  });
      });
    });
  };
  if (pass.count < kManyQueries)
    multiply_tiles(std::integral_constant<int, 1>{});
  else
    multiply_tiles(std::integral_constant<int, 3>{});
}

template <typename E, typename V>
void absorbed_pass(const MlaArgs& args, AbsorbedPass<V> pass) {
  parallel(args.heads, [&](int64_t head) { absorb_queries<E>(args, pass, head); });
  const int64_t partials = pass.first_partial[pass.count];
  const auto groups = [&] { return (args.heads + pass.group - 1) / pass.group; };
  while (pass.group > kPanel && partials * groups() < 4 * num_threads()) pass.group -= kPanel;
  parallel(partials * groups(), [&](int64_t chunk) {
    const int64_t partial = chunk / groups();
    const int64_t i = std::upper_bound(pass.first_partial, pass.first_partial + pass.count, partial) - pass.first_partial - 1;
    attend_range(args, pass, i, partial - pass.first_partial[i], chunk % groups() * pass.group);
  });
  parallel(args.heads, [&](int64_t head) { expand_contexts<E>(args, pass, head); });
}

// Attention of `count` queries, each over the rows it names.
template <typename E>
void absorbed_attention(const MlaArgs& args, const Query* queries, int64_t count) {
  using V = Operand<E>;
  const int64_t all = round_up(args.heads, kLanes), per_partial = 2 * all + args.heads * args.latent;
  for (int64_t begin = 0; begin < count;) {
    Scratch scratch;
    auto* first_partial = scratch.take<int64_t>(count - begin + 1);
    first_partial[0] = 0;
    int64_t end = begin;
    do {
      first_partial[end + 1 - begin] = first_partial[end - begin] + num_ranges(queries[end].count);
      ++end;
    } while (end < count && (first_partial[end - begin] + num_ranges(queries[end].count)) * per_partial * 4 <= kPartialBytes);
    const int64_t partials = first_partial[end - begin];
    absorbed_pass<E, V>(args, {queries + begin, end - begin, first_partial,
                               scratch.take<V>((end - begin) * args.heads * (args.latent + args.shared)),
                               scratch.take<float>(partials * all), scratch.take<float>(partials * all),
                               scratch.take<float>(partials * args.heads * args.latent), kMostLanes});
    begin = end;
  }
}

}  // namespace perilune::PERILUNE_ISA
