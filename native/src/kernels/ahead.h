// Weights on their way from memory while others are computed with.
#pragma once

#include "perilune.h"
#include "simd/element.h"

namespace perilune::PERILUNE_ISA {

// Memory that is asked for little by little, while something else is computed.
struct Ahead {
  const char *at, *end;

  // Rows [first, last) of w
  Ahead(const Matrix& w, int64_t first, int64_t last)
      : at(static_cast<const char*>(w.data) + type_bytes(w.type, first * w.columns)),
        end(static_cast<const char*>(w.data) + type_bytes(w.type, last * w.columns)) {}

  void ask(int64_t bytes) {
    for (const char* until = bytes < end - at ? at + bytes : end; at < until; at += 64) prefetch_far(at);
  }
};

}  // namespace perilune::PERILUNE_ISA
