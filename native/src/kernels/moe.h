// The mixture of experts: SiTU, router, and the expert pass grouped by expert.
#pragma once

#include <cmath>
#include <stdexcept>

#include "kernels/dot.h"
#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline void situ(const SituArgs& args) {
  constexpr int64_t kStep = 2048;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    const auto *gate = static_cast<const E*>(args.gate), *up = static_cast<const E*>(args.up);
    auto* y = static_cast<E*>(args.y);
    parallel((args.count + kStep - 1) / kStep, [&](int64_t chunk) {
      const int64_t first = chunk * kStep, count = smaller(kStep, args.count - first);
      for_vectors(count, [&](auto load, auto store, int64_t i) {
        const int64_t at = first + i;
        store(y + at, situ(load(gate + at), load(up + at), set(args.beta), set(args.linear_beta)));
      });
    });
  });
}

// The same rows without the first ones.
inline PackedRows rows_from(PackedRows packed, int64_t first) {
  packed.data += first * packed.stride;
  return packed;
}

// ---- router ---------------------------------------------------------------------------------------------------------

// Orders as numbers do: a score, then the lower id. NaN is above every number, as torch sorts it.
inline uint64_t rank_of(float score, int64_t id) {
  score += 0.0f;  // -0 ties with 0
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  if (score != score) bits = 0x7fffffffu;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

// The `chosen` highest of scores + bias, in descending order; `best` is room for them.
inline void choose(const float* scores, const float* bias, int64_t count, int64_t chosen, uint64_t* best, int64_t* ids) {
  for (int64_t i = 0; i < chosen; ++i) best[i] = 0;
  for (int64_t id = 0; id < count; ++id) {
    const uint64_t rank = rank_of(scores[id] + bias[id], id);
    if (rank <= best[chosen - 1]) continue;
    int64_t at = chosen - 1;
    for (; at > 0 && best[at - 1] < rank; --at) best[at] = best[at - 1];
    best[at] = rank;
  }
  for (int64_t i = 0; i < chosen; ++i) ids[i] = static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(best[i]));
}

// One token: sigmoid of its logits in place, then choice and weights.
inline void route_token(const RouteArgs& args, float* logits, int64_t* ids, float* weights) {
  Scratch scratch;
  const int64_t experts = args.weight.rows;
  // below, e^-x would overflow, and the score is less than any that counts
  const F least = set(-87.0f);
  for_vectors(experts, [&](auto load, auto store, int64_t i) {
    const F x = load(logits + i);
    store(logits + i, select_less(x, least, zero(), sigmoid(x)));
  });
  choose(logits, args.bias, experts, args.chosen, scratch.take<uint64_t>(args.chosen), ids);
  float total = 1e-20f;
  for (int64_t i = 0; i < args.chosen; ++i) total += logits[ids[i]];
  for (int64_t i = 0; i < args.chosen; ++i) {
    const float score = logits[ids[i]];
    weights[i] = (args.renormalize ? score / total : score) * args.scaling;
  }
}

inline void moe_route(const RouteArgs& args) {
  constexpr int64_t kSlab = 512;   // tokens whose packed rows and logits are kept at a time
  constexpr int64_t kBlock = 128;  // tokens of a chunk
  const int64_t experts = args.weight.rows, columns = args.weight.columns;
  for (int64_t first = 0; first < args.tokens; first += kSlab) {
    const int64_t tokens = smaller(kSlab, args.tokens - first);
    Scratch scratch;
    const char* x = static_cast<const char*>(args.x) + type_bytes(args.type, first * columns);
    const PackedRows packed =
        pack(scratch, packing_for(args.weight.type, args.type, false), x, args.type, tokens, columns);
    auto* logits = scratch.take<float>(tokens * experts);
    const int64_t block = smaller(tokens, kBlock), blocks = (tokens + block - 1) / block;
    const int64_t rows = chunk_rows(packed.packing, args.weight, block);
    parallel((experts + rows - 1) / rows * blocks, [&](int64_t chunk) {
      const int64_t from = chunk / blocks * rows, token = chunk % blocks * block;
      dot(args.weight, from, smaller(experts, from + rows), rows_from(packed, token), nullptr,
          smaller(block, tokens - token), logits + token * experts + from, experts);
    });
    constexpr int64_t kStep = 8;
    parallel((tokens + kStep - 1) / kStep, [&](int64_t chunk) {
      for (int64_t token = chunk * kStep; token < tokens && token < (chunk + 1) * kStep; ++token)
        route_token(args, logits + token * experts, args.ids + (first + token) * args.chosen,
                    args.weights + (first + token) * args.chosen);
    });
  }
}

// ---- expert pass ----------------------------------------------------------------------------------------------------

// The pairs (token, choice) of some tokens, grouped by expert. Those of expert e stand at [starts[e], starts[e + 1]),
// in the order of their tokens.
struct Groups {
  int32_t* starts;  // [experts + 1]
  int32_t* pairs;   // token * chosen + choice
  int32_t* tokens;

  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// Some experts whose pairs are computed together: those of each begin at row `rows[expert]` of their intermediate rows.
struct Batch {
  const int32_t* experts;
  int64_t count;
  int32_t* rows;  // [num_experts], filled for these
};

// By counting, which keeps the order. `ids` are those of `tokens` tokens.
inline Groups group_by_expert(Scratch& scratch, const int64_t* ids, int64_t tokens, int64_t chosen, int64_t experts) {
  const int64_t pairs = tokens * chosen;
  Groups groups = {scratch.take<int32_t>(experts + 2), scratch.take<int32_t>(pairs), scratch.take<int32_t>(pairs)};
  // Counts stand two places on: while pairs are placed, starts[e + 1] is where the next of expert e goes.
  int32_t* next = groups.starts + 1;
  std::memset(groups.starts, 0, (experts + 2) * sizeof(int32_t));
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (ids[pair] < 0 || ids[pair] >= experts) throw std::out_of_range("moe_experts: an id that is no expert's");
    ++next[ids[pair] + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) next[expert + 1] += next[expert];
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t at = next[ids[pair]]++;
    groups.pairs[at] = static_cast<int32_t>(pair);
    groups.tokens[at] = static_cast<int32_t>(pair / chosen);
  }
  return groups;
}

// Weight rows [first, last) of one expert.
struct Piece {
  int32_t expert, first, last;
};

// Pieces in the order of the experts, and the borders of chunks between them: tiny experts share a chunk, large ones
// are cut into many.
struct Pieces {
  Piece* pieces;
  int32_t* chunks;  // [num_chunks + 1]
  int64_t num_chunks;
};

// `rows` and `columns` are those of a matrix, `matrices` are multiplied together.
inline Pieces cut(Scratch& scratch, const Groups& groups, const Batch& batch, const Matrix& w, int matrices,
                  Packing packing) {
  int64_t most = 0;
  for (int64_t at = 0; at < batch.count; ++at) {
    const int64_t least = least_rows(packing, w.columns, groups.count(batch.experts[at]));
    most += (w.rows + least - 1) / least;
  }
  Pieces cut = {scratch.take<Piece>(most), scratch.take<int32_t>(most + 1), 0};
  int32_t count = 0;
  double time = 0.0;
  cut.chunks[0] = 0;
  for (int64_t at = 0; at < batch.count; ++at) {
    const int32_t expert = batch.experts[at];
    const int64_t least = least_rows(packing, w.columns, groups.count(expert));
    const double each = matrices * row_time(w.type, w.columns, groups.count(expert));
    for (int64_t first = 0; first < w.rows;) {
      const int64_t wanted = static_cast<int64_t>((kChunkTime - time) / each) / least * least;
      const int64_t last = smaller(w.rows, first + larger(least, wanted));
      cut.pieces[count++] = {expert, static_cast<int32_t>(first), static_cast<int32_t>(last)};
      time += each * static_cast<double>(last - first);
      first = last;
      if (time + each * static_cast<double>(least) <= kChunkTime) continue;
      cut.chunks[++cut.num_chunks] = count;
      time = 0.0;
    }
  }
  if (cut.chunks[cut.num_chunks] != count) cut.chunks[++cut.num_chunks] = count;
  return cut;
}

// One call's constants, and the products of one slab of tokens.
template <typename E>
class ExpertPass {
 public:
  ExpertPass(const ExpertsArgs& args)
      : args_(args),
        packing_(packing_for(args.weight_type, args.type, args.int8_activations)),
        addresses_(args.addresses) {}

  void run() {
    const int64_t bytes = args_.chosen * args_.latent * static_cast<int64_t>(sizeof(E));
    const int64_t slab = larger(1, args_.scratch_bytes / 2 / bytes);
    for (int64_t first = 0; first < args_.tokens; first += slab) run_slab(first, smaller(slab, args_.tokens - first));
  }

 private:
  Matrix matrix(int64_t expert, int which) const {
    const int64_t* at = addresses_ + expert * 6 + which * 2;
    const bool is_down = which == 2;
    return {reinterpret_cast<const void*>(at[0]), reinterpret_cast<const void*>(at[1]),
            is_down ? args_.latent : args_.inner, is_down ? args_.inner : args_.latent, args_.weight_type};
  }

  // Only the outputs of all pairs are kept to the end, so that experts may come in any order.
  void run_slab(int64_t first, int64_t tokens) {
    Scratch scratch;
    const auto* x = static_cast<const E*>(args_.x) + first * args_.latent;
    const PackedRows packed = pack(scratch, packing_, x, args_.type, tokens, args_.latent);
    const Groups groups =
        group_by_expert(scratch, args_.ids + first * args_.chosen, tokens, args_.chosen, args_.num_experts);
    auto* outputs = scratch.take<E>(tokens * args_.chosen * args_.latent);
    auto *experts = scratch.take<int32_t>(args_.num_experts), *rows = scratch.take<int32_t>(args_.num_experts);
    int64_t count = 0;
    for (int32_t expert = 0; expert < args_.num_experts; ++expert)
      if (groups.count(expert) > 0) experts[count++] = expert;
    if (args_.source == nullptr) {
      run_experts(groups, {experts, count, rows}, packed, outputs);
    } else {
      run_arriving(groups, {experts, count, rows}, first, packed, outputs);
    }
    add_up(outputs, args_.weights + first * args_.chosen, tokens, static_cast<E*>(args_.y) + first * args_.latent);
  }

  // Those that are there are computed while the others are read.
  void run_arriving(const Groups& groups, const Batch& wanted, int64_t first, const PackedRows& x, E* outputs) {
    Scratch scratch;
    auto* taken = scratch.take<int32_t>(args_.num_experts);
    auto* addresses = scratch.take<int64_t>(args_.num_experts * 6);
    auto* readable = scratch.take<int32_t>(args_.num_experts);
    addresses_ = addresses;
    args_.source->begin(args_.layer, wanted.experts, wanted.count);
    while (const int64_t count = args_.source->take(taken, addresses)) {
      int64_t num_readable = 0;
      for (int64_t at = 0; at < count; ++at) {
        if (addresses[taken[at] * 6] != 0) readable[num_readable++] = taken[at];
        else spoil(groups, taken[at], first, outputs);
      }
      run_experts(groups, {readable, num_readable, wanted.rows}, x, outputs);
      args_.source->give_back(taken, count);
    }
  }

  void spoil(const Groups& groups, int32_t expert, int64_t first, E* outputs) const {
    const int64_t start = groups.starts[expert], count = groups.count(expert);
    for (int64_t pair = start; pair < start + count; ++pair) {
      E* to = outputs + groups.pairs[pair] * args_.latent;
      for_vectors(args_.latent, [&](auto, auto store, int64_t i) { store(to + i, set(NAN)); });
    }
    args_.source->spoil(expert, groups.tokens + start, count, first);
  }

  // In runs of experts whose intermediate rows fit.
  void run_experts(const Groups& groups, const Batch& batch, const PackedRows& x, E* outputs) {
    const int64_t most = args_.scratch_bytes / 4 / (args_.inner * static_cast<int64_t>(sizeof(E) + sizeof(float)));
    for (int64_t from = 0; from < batch.count;) {
      int64_t to = from, pairs = 0;
      do {
        batch.rows[batch.experts[to]] = static_cast<int32_t>(pairs);
        pairs += groups.count(batch.experts[to++]);
      } while (to < batch.count && pairs + groups.count(batch.experts[to]) <= most);
      run_fitting(groups, {batch.experts + from, to - from, batch.rows}, pairs, x, outputs);
      from = to;
    }
  }

  void run_fitting(const Groups& groups, const Batch& batch, int64_t pairs, const PackedRows& x, E* outputs) {
    Scratch scratch;
    auto* inner = scratch.take<E>(pairs * args_.inner);
    const Pieces up = cut(scratch, groups, batch, matrix(batch.experts[0], 0), 2, packing_);
    parallel(up.num_chunks, [&](int64_t chunk) {
      for (int32_t at = up.chunks[chunk]; at < up.chunks[chunk + 1]; ++at) {
        const Piece& piece = up.pieces[at];
        go_up(groups, piece, x, inner + batch.rows[piece.expert] * args_.inner);
      }
    });
    const PackedRows packed = pack(scratch, packing_, inner, args_.type, pairs, args_.inner);
    const Pieces down = cut(scratch, groups, batch, matrix(batch.experts[0], 2), 1, packing_);
    parallel(down.num_chunks, [&](int64_t chunk) {
      for (int32_t at = down.chunks[chunk]; at < down.chunks[chunk + 1]; ++at) {
        const Piece& piece = down.pieces[at];
        go_down(groups, piece, rows_from(packed, batch.rows[piece.expert]), outputs);
      }
    });
  }

  // situ(w1 x, w3 x) of one piece into rows of `inner`, one for each pair of its expert.
  void go_up(const Groups& groups, const Piece& piece, const PackedRows& x, E* inner) const {
    const Matrix w1 = matrix(piece.expert, 0), w3 = matrix(piece.expert, 1);
    const int64_t width = piece.last - piece.first, start = groups.starts[piece.expert];
    const int64_t count = groups.count(piece.expert);
    Scratch scratch;
    auto *gates = scratch.take<float>(count * width), *ups = scratch.take<float>(count * width);
    dot(w1, piece.first, piece.last, x, groups.tokens + start, count, gates, width);
    dot(w3, piece.first, piece.last, x, groups.tokens + start, count, ups, width);
    const F beta = set(args_.beta), linear_beta = set(args_.linear_beta);
    for (int64_t i = 0; i < count; ++i) {
      const float *gate = gates + i * width, *up = ups + i * width;
      E* to = inner + i * args_.inner + piece.first;
      for_vectors(width, [&](auto load, auto store, int64_t j) {
        E rounded[2][kLanes];  // as the products of two linears would be
        perilune::PERILUNE_ISA::store(rounded[0], load(gate + j));
        perilune::PERILUNE_ISA::store(rounded[1], load(up + j));
        store(to + j, situ(perilune::PERILUNE_ISA::load(rounded[0]), perilune::PERILUNE_ISA::load(rounded[1]), beta,
                           linear_beta));
      });
    }
  }

  // w2 times the intermediate rows of one piece's expert into its pairs' rows of `outputs`.
  void go_down(const Groups& groups, const Piece& piece, const PackedRows& inner, E* outputs) const {
    const int64_t width = piece.last - piece.first, start = groups.starts[piece.expert];
    const int64_t count = groups.count(piece.expert);
    Scratch scratch;
    auto* y = scratch.take<float>(count * width);
    dot(matrix(piece.expert, 2), piece.first, piece.last, inner, nullptr, count, y, width);
    for (int64_t i = 0; i < count; ++i) {
      E* to = outputs + groups.pairs[start + i] * args_.latent + piece.first;
      for_vectors(width, [&](auto load, auto store, int64_t j) { store(to + j, load(y + i * width + j)); });
    }
  }

  void add_up(const E* outputs, const float* weights, int64_t tokens, E* y) const {
    constexpr int64_t kStep = 1024;
    const int64_t steps = (args_.latent + kStep - 1) / kStep;
    parallel(tokens * steps, [&](int64_t chunk) {
      const int64_t token = chunk / steps, first = chunk % steps * kStep;
      const E* from = outputs + token * args_.chosen * args_.latent + first;
      E* to = y + token * args_.latent + first;
      for_vectors(smaller(kStep, args_.latent - first), [&](auto load, auto store, int64_t i) {
        F total = zero();
        for (int64_t k = 0; k < args_.chosen; ++k)
          total = fma(set(weights[token * args_.chosen + k]), load(from + k * args_.latent + i), total);
        store(to + i, total);
      });
    });
  }

  const ExpertsArgs& args_;
  const Packing packing_;
  const int64_t* addresses_;
};

inline void moe_experts(const ExpertsArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    ExpertPass<E>(args).run();
  });
}

}  // namespace perilune::PERILUNE_ISA
