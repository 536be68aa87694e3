// Latent attention in plain form: a head's keys and values are expanded once for many queries.
#pragma once

#include <algorithm>

#include "kernels/attention_block.h"
#include "kernels/packed_rows.h"

namespace perilune::PERILUNE_ISA {

// Queries that share one expansion of the keys, at most; their packed rows and contexts are a thread's scratch.
constexpr int64_t kMostShared = 4096;
// Fewer would pay more for keys than for attention.
constexpr int64_t kFewestShared = 256;

// One head's share of the weights, packed, and the blocks its keys and values are expanded into, in strips.
template <typename V>
struct Expansion {
  V *w_uk, *w_uv;  // panels [latent][key], [latent][value]
  V* latents;      // [latent + shared]
  float* sums;     // [max(key, value)], before they are rounded for products in pairs
  V* keys;         // [key + shared]
  V* values;       // [value]
};

template <typename E, typename V = Operand<E>>
Expansion<V> packed_weights(const MlaArgs& args, int64_t head, Scratch& scratch) {
  const auto take = [&](int64_t rows, int64_t width) {
    return scratch.take<V>(rows * row_cells<V>(width) * kCellValues<V>);
  };
  const Expansion<V> own = {take(args.key, args.latent), take(args.value, args.latent),
                            take(kBlockRows, args.latent + args.shared),
                            scratch.take<float>(kIsPaired<V> ? kBlockRows * std::max(args.key, args.value) : 0),
                            take(kBlockRows, args.key + args.shared),
                            scratch.take<V>(args.value * kCellValues<V> * kBlockCells<V>)};
  const E *w_uk = static_cast<const E*>(args.w_uk), *w_uv = static_cast<const E*>(args.w_uv);
  pack_panels(w_uk + head * args.uk_stride, args.key, args.latent, args.latent, own.w_uk);
  pack_panels(w_uv + head * args.uv_stride, args.value, args.latent, args.latent, own.w_uv);
  return own;
}

// Sums of latents and weights as keys, or as values.
template <typename V>
void round_keys(const float* sums, int64_t count, int64_t columns, V* keys) {
  for (int64_t c = 0; c < columns; c += 16)
    for (int64_t i = 0; i < count; ++i)
      store(keys + column_at<V>(kBlockRows, c) + i * kStripValues<V>, load(sums + c * kBlockRows + i * kStrip));
}
template <typename V>
void round_values(const float* sums, int64_t count, int64_t columns, V* values) {
  for (int64_t c = 0; c < columns; c += 16) {
    const float* column = sums + c * kBlockRows;
    Cell<V>* to = cells(values) + c * kBlockCells<V>;
    for (int64_t i = 0; i < count; i += 2, to += kStrip)
      store(to, load(column + i * kStrip), i + 1 < count ? load(column + (i + 1) * kStrip) : zero());
  }
}

// Keys and values of rows first .. first + count - 1, rounded to E.
template <typename E, typename V>
void expand_block(const MlaArgs& args, const Expansion<V>& own, int64_t sequence, int64_t first, int64_t count) {
  const void* rows[kKeyBlock];
  find_rows(args.pages, sequence, nullptr, first, first + count, count, rows);
  read_rows({args.row_type, args.latent, args.latent + args.shared}, rows, count, own.latents, kBlockRows);
  const auto expand = [&](const V* weight, int64_t columns, float* out, const auto& finish) {
    const int64_t depth = row_cells<V>(args.latent);
    for_panels(columns, [&](auto vectors, int64_t column) {
      panel_product<vectors()>(cells(own.latents), kBlockRows, count, cells(weight) + column * depth, depth,
                               {out + column * kBlockRows, kStrip, strip_vector(kBlockRows)}, finish);
    });
  };
  if constexpr (kIsPaired<V>) {
    const auto as_it_is = [](F sum) { return sum; };
    expand(own.w_uk, args.key, own.sums, as_it_is);
    round_keys(own.sums, count, args.key, own.keys);
    expand(own.w_uv, args.value, own.sums, as_it_is);
    round_values(own.sums, count, args.value, own.values);
  } else {
    const auto rounded = [](F sum) { return round_to<E>(sum); };
    expand(own.w_uk, args.key, own.keys, rounded);
    expand(own.w_uv, args.value, own.values, rounded);
  }
  for (int64_t i = 0; i < count * kStripValues<V>; i += kStripValues<V>)
    for (int64_t c = 0; c < args.shared; c += kLanes)
      store(own.keys + i + column_at<V>(kBlockRows, args.key + c),
            load(own.latents + i + column_at<V>(kBlockRows, args.latent + c)));
  for (int64_t i = 0; i < count; ++i) fill_strip(args.key + args.shared, own.keys + i * kStripValues<V>, kBlockRows);
}

// Lanes of one head for `count` queries of a sequence, in the order of their positions.
template <typename E, typename V = Operand<E>>
Lanes<V> query_lanes(const MlaArgs& args, const Query* queries, int64_t count, int64_t head, Scratch& scratch) {
  const int64_t width = args.key + args.shared, padded = round_up(count, kLanes);
  auto* last = scratch.take<float>(padded);
  Lanes<V> lanes = {count, padded, width, args.value, args.scale,
                    scratch.take<V>(row_cells<V>(width) * kCellValues<V> * padded), scratch.take<float>(padded),
                    scratch.take<float>(padded), scratch.take<float>(count * args.value), last};
  for (int64_t i = 0; i < padded; ++i) last[i] = static_cast<float>(queries[i < count ? i : count - 1].count - 1);
  Scratch rows;
  auto* q = rows.take<E>(count * width);
  for (int64_t i = 0; i < count; ++i) std::copy_n(query_head<E>(args, queries[i].token, head), width, q + i * width);
  pack_panels(q, count, width, width, lanes.q);
  begin(lanes);
  return lanes;
}

template <typename E, typename V>
void write_outputs(const MlaArgs& args, const Lanes<V>& lanes, const Query* queries, int64_t head) {
  for (int64_t i = 0; i < lanes.count; ++i) {
    E* o = static_cast<E*>(args.o) + (queries[i].token * args.heads + head) * args.value;
    const F total = set(lanes.total[i]);
    for (int64_t c = 0; c < args.value; c += kLanes)
      store(o + c, div(load(lanes.context + c / kStrip * kStrip * lanes.count + i * kStrip + c % kStrip), total));
  }
}

// One head's attention for `count` queries of one sequence.
template <typename E, typename V>
void attend_expanded(const MlaArgs& args, const Expansion<V>& own, const Query* queries, int64_t count, int64_t head) {
  Scratch scratch;
  const int64_t groups = (count + kMostLanes - 1) / kMostLanes;
  auto* lanes = scratch.take<Lanes<V>>(groups);
  const auto first_of = [&](int64_t group) { return queries + group * kMostLanes; };
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t rest = count - group * kMostLanes;
    lanes[group] = query_lanes<E>(args, first_of(group), rest < kMostLanes ? rest : kMostLanes, head, scratch);
  }
  const int64_t visible = queries[count - 1].count;
  for (int64_t first = 0; first < visible; first += kKeyBlock) {
    const int64_t block = visible - first < kKeyBlock ? visible - first : kKeyBlock;
    expand_block<E>(args, own, queries->sequence, first, block);
    for (int64_t group = 0; group < groups; ++group)
      attend(lanes[group], own.keys, own.values, first, block, {});
  }
  for (int64_t group = 0; group < groups; ++group) write_outputs<E>(args, lanes[group], first_of(group), head);
}

// Attention of `count` queries, each over all rows it can see, in the order of sequences and positions.
template <typename E>
void expanded_attention(const MlaArgs& args, const Query* queries, int64_t count) {
  if (count == 0) return;
  // As many spans as keep every thread busy, none so short that expanding keys would outweigh attention.
  const int64_t needed = (count + kMostShared - 1) / kMostShared;
  const int64_t wanted = (2 * num_threads() + args.heads - 1) / args.heads, allowed = count / kFewestShared;
  const int64_t spans = wanted < allowed ? (wanted > needed ? wanted : needed) : (allowed > needed ? allowed : needed);
  parallel(spans * args.heads, [&](int64_t chunk) {
    const int64_t head = chunk % args.heads, span = chunk / args.heads;
    Scratch scratch;
    const auto own = packed_weights<E>(args, head, scratch);
    const int64_t end = count * (span + 1) / spans;
    for (int64_t first = count * span / spans, next; first < end; first = next) {
      next = first + 1;
      while (next < end && queries[next].sequence == queries[first].sequence) ++next;
      attend_expanded<E>(args, own, queries + first, next - first, head);
    }
  });
}

}  // namespace perilune::PERILUNE_ISA
