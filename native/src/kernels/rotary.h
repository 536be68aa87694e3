// Rotary positions: turns of every token's position, and heads turned by them.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/norm.h"

namespace perilune::PERILUNE_ISA {

// Chunks are sequences' tokens; the angles are doubles, for they reach hundreds of thousands of radians.
inline void rotary_turns(const TurnsArgs& args) {
  for (int64_t n = 0; n < args.count; ++n) {
    const int64_t first = args.cu_seqlens[n], length = args.cu_seqlens[n + 1] - first;
    parallel(length, [&](int64_t i) {
      const double position = static_cast<double>(args.seq_lens[n] - length + i);
      float* to = args.turns + (first + i) * 2 * args.pairs;
      for (int64_t pair = 0; pair < args.pairs; ++pair) {
        const double angle = position * args.frequencies[pair];
        to[pair] = static_cast<float>(std::cos(angle) * args.factor);
        to[args.pairs + pair] = static_cast<float>(std::sin(angle) * args.factor);
      }
    });
  }
}

// y [turned] of x [turned]; they may be the same.
template <typename E>
void turn(const E* x, const float* turns, int64_t turned, bool is_interleaved, E* y) {
  const int64_t pairs = turned / 2, step = is_interleaved ? 2 : 1, apart = is_interleaved ? 1 : pairs;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const float a = widen(x[pair * step]), b = widen(x[pair * step + apart]);
    const float cos = turns[pair], sin = turns[pairs + pair];
    y[pair * step] = narrow<E>(a * cos - b * sin);
    y[pair * step + apart] = narrow<E>(a * sin + b * cos);
  }
}

inline void rotate(const RotateArgs& args) {
  const int64_t columns = args.heads * args.width, step = rows_per_chunk(columns), kept = args.width - args.turned;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.tokens + step - 1) / step, [&](int64_t chunk) {
      for (int64_t t = chunk * step; t < args.tokens && t < (chunk + 1) * step; ++t)
        for (int64_t head = 0; head < args.heads; ++head) {
          const int64_t at = t * columns + head * args.width;
          const E* x = static_cast<const E*>(args.x) + at;
          E* y = static_cast<E*>(args.y) + at;
          std::memcpy(y, x, static_cast<size_t>(kept) * sizeof(E));
          turn(x + kept, args.turns + t * args.turned, args.turned, args.is_interleaved, y + kept);
        }
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
