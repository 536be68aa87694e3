// Rows of activations taken, put away, added, gated and scaled.
#pragma once

#include <stdexcept>

#include "kernels/norm.h"

namespace perilune::PERILUNE_ISA {

// Elements of a chunk: what one thread moves in a few microseconds.
constexpr int64_t kElementsPerChunk = 16384;

// Calls body(load, store, i) over [0, count), in pieces that the pool shares out.
template <typename Body>
void for_elements(int64_t count, const Body& body) {
  parallel((count + kElementsPerChunk - 1) / kElementsPerChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kElementsPerChunk, left = count - first;
    for_vectors(left < kElementsPerChunk ? left : kElementsPerChunk,
                [&](auto load, auto store, int64_t i) { body(load, store, first + i); });
  });
}

// Calls body with typed null pointers of both element types.
template <typename Body>
void with_elements(Type first, Type second, const Body& body) {
  with_element(first, [&](auto* a) { with_element(second, [&](auto* b) { body(a, b); }); });
}

template <typename From, typename To>
void convert_row(const From* x, int64_t columns, To* y) {
  for_vectors(columns, [&](auto load, auto store, int64_t i) { store(y + i, load(x + i)); });
}

inline void check_rows(const int64_t* rows, int64_t count, int64_t num_rows, const char* what) {
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= num_rows) throw std::out_of_range(what);
}

inline void embed_rows(const EmbedArgs& args) {
  check_rows(args.ids, args.tokens, args.num_rows, "embed_rows: an id is not a row of the weight");
  const int64_t step = rows_per_chunk(args.columns);
  with_elements(args.weight_type, args.type, [&](auto* w, auto* e) {
    using W = std::remove_pointer_t<decltype(w)>;
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.tokens + step - 1) / step, [&](int64_t chunk) {
      for (int64_t token = chunk * step; token < args.tokens && token < (chunk + 1) * step; ++token)
        convert_row(static_cast<const W*>(args.weight) + args.ids[token] * args.columns, args.columns,
                    static_cast<E*>(args.y) + token * args.columns);
    });
  });
}

inline void store_rows(const StoreArgs& args) {
  check_rows(args.slots, args.tokens, args.num_rows, "store_rows: a slot is not a row of the pool");
  // in order, so that of equal slots the last row stays
  with_elements(args.type, args.pool_type, [&](auto* e, auto* p) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    using P = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    for (int64_t token = 0; token < args.tokens; ++token)
      convert_row(static_cast<const E*>(args.x) + token * args.columns, args.columns,
                  static_cast<P*>(args.pool) + args.slots[token] * args.columns);
  });
}

inline void append_rows(const AppendArgs& args) {
  if (*args.end < 0 || args.tokens > args.num_rows - *args.end)
    throw std::out_of_range("append_rows: the pool has no room for the rows");
  with_elements(args.type, args.pool_type, [&](auto* e, auto* p) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    using P = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    convert_row(static_cast<const E*>(args.x), args.tokens * args.columns,
                static_cast<P*>(args.pool) + *args.end * args.columns);
  });
  *args.end += args.tokens;
}

inline void add_rows(const PairArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    const E *x = static_cast<const E*>(args.x), *z = static_cast<const E*>(args.z);
    E* y = static_cast<E*>(args.y);
    for_elements(args.count, [&](auto load, auto store, int64_t i) { store(y + i, add(load(x + i), load(z + i))); });
  });
}

inline void gate_rows(const PairArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    const E *x = static_cast<const E*>(args.x), *gate = static_cast<const E*>(args.z);
    E* y = static_cast<E*>(args.y);
    for_elements(args.count, [&](auto load, auto store, int64_t i) {
      store(y + i, mul(load(x + i), rounded_as<E>(sigmoid(load(gate + i)))));
    });
  });
}

inline void swiglu(const PairArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    const E *gate = static_cast<const E*>(args.x), *up = static_cast<const E*>(args.z);
    E* y = static_cast<E*>(args.y);
    for_elements(args.count, [&](auto load, auto store, int64_t i) {
      store(y + i, mul(rounded_as<E>(silu(load(gate + i))), load(up + i)));
    });
  });
}

inline void scale_rows(const ScaleArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    const E* x = static_cast<const E*>(args.x);
    for_elements(args.count,
                 [&](auto load, auto store, int64_t i) { store(args.y + i, mul(load(x + i), set(args.factor))); });
  });
}

}  // namespace perilune::PERILUNE_ISA
