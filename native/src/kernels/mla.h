// Latent attention: which form serves which query. See ops/mla for the contract.
#pragma once

#include <algorithm>

#include "kernels/mla_absorbed.h"
#include "kernels/mla_expanded.h"

namespace perilune::PERILUNE_ISA {

// Positions of a selection without the entries that name none, ascending: in place where they already are.
inline const int64_t* ascending(const int64_t* selected, int64_t num_selected, Scratch& scratch, int64_t& count) {
  count = 0;
  while (count < num_selected && selected[count] >= 0 && (count == 0 || selected[count] > selected[count - 1])) ++count;
  if (std::all_of(selected + count, selected + num_selected, [](int64_t position) { return position < 0; })) return selected;
  auto* sorted = scratch.take<int64_t>(num_selected);
  count = std::copy_if(selected, selected + num_selected, sorted, [](int64_t position) { return position >= 0; }) - sorted;
  std::sort(sorted, sorted + count);
  return sorted;
}

// The queries of a call in the order of its tokens. A selection of every visible row is no selection.
inline Query* list_queries(const MlaArgs& args, Scratch& scratch, int64_t& count) {
  const Sequences& sequences = args.sequences;
  const int64_t first = sequences.cu_seqlens[0];
  count = sequences.cu_seqlens[sequences.count] - first;
  auto* queries = scratch.take<Query>(count);
  for (int64_t n = 0; n < sequences.count; ++n)
    for (int64_t token = sequences.cu_seqlens[n]; token < sequences.cu_seqlens[n + 1]; ++token) {
      Query& query = queries[token - first];
      query = {token, n, visible_rows(args.pages, sequences, n, token), nullptr};
      if (args.selected == nullptr) continue;
      int64_t chosen;
      const int64_t* positions = ascending(args.selected + token * args.num_selected, args.num_selected, scratch, chosen);
      if (chosen < query.count) query.count = chosen, query.positions = positions;
    }
  return queries;
}

inline void mla_decode(const MlaArgs& args) {
  Scratch scratch;
  int64_t count;
  const Query* queries = list_queries(args, scratch, count);
  with_element(args.type, [&](auto* e) {
    absorbed_attention<std::remove_const_t<std::remove_pointer_t<decltype(e)>>>(args, queries, count);
  });
}

// Queries that see all rows take the plain form, those with a selection gather it: which, each query decides for itself.
inline void mla_prefill(const MlaArgs& args) {
  Scratch scratch;
  int64_t count;
  Query* queries = list_queries(args, scratch, count);
  Query* selective = std::stable_partition(queries, queries + count, [](const Query& q) { return q.positions == nullptr; });
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    expanded_attention<E>(args, queries, selective - queries);
    absorbed_attention<E>(args, selective, queries + count - selective);
  });
}

}  // namespace perilune::PERILUNE_ISA
