// The lightning indexer: scores of all visible keys, heads summed in registers, and the exact choice of the largest.
#pragma once

#include <algorithm>

#include "kernels/packed_rows.h"
#include "kernels/select.h"

namespace perilune::PERILUNE_ISA {

// Keys that stay in the first-level cache while queries pass, and keys of a chunk of work.
constexpr int64_t kIndexBlock = 48;
constexpr int64_t kIndexRange = 16 * kIndexBlock;
// Queries that share the keys of a block.
constexpr int64_t kIndexQueries = 8;
// Scores of one pass; more queries than fit take several.
constexpr int64_t kScoreBytes = int64_t{32} << 20;

// Neighbouring queries of one sequence, and where their scores go: query i's at scores + i * stride.
struct ScoreGroup {
  const Query* queries;
  int64_t count, stride;
  uint32_t* scores;

  int64_t num_keys() const { return queries[count - 1].count; }
  int64_t num_ranges() const { return (num_keys() + kIndexRange - 1) / kIndexRange; }
};

// Scores of one query for `count` keys of a block: sum over heads of weight * relu(q . key), lane by lane, then across.
template <typename C>
void score_keys(const C* q, const float* weights, int64_t heads, int64_t depth, const C* block, int64_t count,
                Fetch& fetch, uint32_t* scores) {
  float totals[kIndexBlock][kLanes];
  for_panels(heads, [&](auto vectors, int64_t head) {
    constexpr int kVectors = vectors();
    for_tiles<kTileRows>(count, [&](auto rows, int64_t first) {
      constexpr int kRows = rows();
      Sums<kRows, kVectors> sums;
      for_sums(sums, [](F& sum, int, int) { sum = zero(); });
      fetch.lines(kTileFetch);
      for (int64_t strip = 0; strip < depth; strip += kStrip)
        multiply(block + strip * (kIndexBlock + 1) + first * kStrip, kStrip, 1,
                 q + head * depth + strip * kVectors * kLanes, kVectors * kLanes, kLanes, kStrip, sums);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        F total = head == 0 ? zero() : load(totals[first + r]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          total = fma(max(sums.v[r][v], zero()), load(weights + head + v * kLanes), total);
        store(totals[first + r], total);
      }
    });
  });
  for (int64_t i = 0; i < count; ++i) scores[i] = ordered(sum(load(totals[i])));
}

// Scores of a group's queries for one range of keys.
template <typename E>
void score_range(const IndexerArgs& args, const ScoreGroup& group, int64_t range) {
  using V = Operand<E>;
  const int64_t heads = round_up(args.heads, kLanes), depth = row_cells<V>(args.width), row = depth * kCellValues<V>;
  Scratch scratch;
  auto* q = scratch.take<V>(group.count * heads * row);
  auto* weights = scratch.take<float>(group.count * heads);
  auto* block = scratch.take<V>((kIndexBlock + 1) * row);
  for (int64_t i = 0; i < group.count; ++i) {
    const int64_t token = group.queries[i].token;
    pack_panels(static_cast<const E*>(args.q) + token * args.heads * args.width, args.heads, args.width, args.width,
                q + i * heads * row);
    std::fill_n(std::copy_n(args.weights + token * args.heads, args.heads, weights + i * heads), heads - args.heads, 0.0f);
  }
  const int64_t end = std::min((range + 1) * kIndexRange, group.num_keys());
  const void *rows[kIndexBlock], *next[kIndexBlock];
  int64_t count = find_rows(args.pages, group.queries->sequence, nullptr, range * kIndexRange, end, kIndexBlock, rows);
  for (int64_t first = range * kIndexRange; first < end; first += kIndexBlock) {
    read_rows({args.key_type, args.width, args.width}, rows, count, block, kIndexBlock + 1);
    Fetch fetch = {next, find_rows(args.pages, group.queries->sequence, nullptr, first + kIndexBlock, end, kIndexBlock, next),
                   args.pages.row_bytes};
    for (int64_t i = 0; i < group.count; ++i)
      if (group.queries[i].count > first)
        score_keys(cells(q + i * heads * row), weights + i * heads, heads, depth, cells(block),
                   std::min(count, group.queries[i].count - first), fetch, group.scores + i * group.stride + first);
    std::copy_n(next, count = fetch.count, rows);
  }
}

// Scores and selects for queries that see more than `topk` keys.
template <typename E>
void select_keys(const IndexerArgs& args, const ScoreGroup* groups, int64_t num_groups) {
  Scratch scratch;
  auto* first_chunk = scratch.take<int64_t>(num_groups + 1);
  auto* first_query = scratch.take<int64_t>(num_groups + 1);
  first_chunk[0] = first_query[0] = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    first_chunk[g + 1] = first_chunk[g] + groups[g].num_ranges();
    first_query[g + 1] = first_query[g] + groups[g].count;
  }
  const auto group_of = [&](const int64_t* firsts, int64_t i) {
    return std::upper_bound(firsts, firsts + num_groups, i) - firsts - 1;
  };
  parallel(first_chunk[num_groups], [&](int64_t chunk) {
    const int64_t g = group_of(first_chunk, chunk);
    score_range<E>(args, groups[g], chunk - first_chunk[g]);
  });
  parallel(first_query[num_groups], [&](int64_t i) {
    const int64_t g = group_of(first_query, i), own = i - first_query[g];
    const Query& query = groups[g].queries[own];
    select_largest(groups[g].scores + own * groups[g].stride, query.count, args.topk,
                   args.selected + query.token * args.topk);
  });
}

// Queries that see at most `topk` keys select all of them; lists the others.
inline Query* list_choosing(const IndexerArgs& args, Scratch& scratch, int64_t& count) {
  const Sequences& sequences = args.sequences;
  auto* queries = scratch.take<Query>(sequences.cu_seqlens[sequences.count] - sequences.cu_seqlens[0]);
  count = 0;
  for (int64_t n = 0; n < sequences.count; ++n)
    for (int64_t token = sequences.cu_seqlens[n]; token < sequences.cu_seqlens[n + 1]; ++token) {
      const int64_t visible = visible_rows(args.pages, sequences, n, token);
      if (visible > args.topk) {
        queries[count++] = {token, n, visible, nullptr};
        continue;
      }
      int64_t* selected = args.selected + token * args.topk;
      for (int64_t i = 0; i < args.topk; ++i) selected[i] = i < visible ? i : -1;
    }
  return queries;
}

inline void indexer_topk(const IndexerArgs& args) {
  Scratch scratch;
  int64_t count;
  const Query* queries = list_choosing(args, scratch, count);
  auto* groups = scratch.take<ScoreGroup>(count);
  for (int64_t first = 0; first < count;) {
    Scratch pass;
    int64_t num_groups = 0, bytes = 0;
    while (first < count && (num_groups == 0 || bytes < kScoreBytes)) {
      ScoreGroup& group = groups[num_groups++];
      group = {queries + first, 0, 0, nullptr};
      while (first < count && group.count < kIndexQueries && queries[first].sequence == group.queries->sequence)
        ++group.count, ++first;
      group.stride = group.num_keys();
      group.scores = pass.take<uint32_t>(group.count * group.stride);
      bytes += group.count * group.stride * 4;
    }
    with_element(args.type, [&](auto* e) {
      select_keys<std::remove_const_t<std::remove_pointer_t<decltype(e)>>>(args, groups, num_groups);
    });
  }
}

}  // namespace perilune::PERILUNE_ISA
