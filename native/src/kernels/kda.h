// The gated delta rule token by token, and what the chunk form shares with it.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kLineFloats = 16;  // of a cache line

// Calls body with the head width as a compile-time constant where it is K3's, else with zero.
template <typename Body>
void with_width(int64_t width, const Body& body) {
  if (width == 128)
    body(std::integral_constant<int64_t, 128>());
  else
    body(std::integral_constant<int64_t, 0>());
}

// x / sqrt(sum x^2 + eps), rounded to E, times scale; x [width] in place.
template <typename E>
void l2_normalise(float* x, int64_t width, float eps, float scale) {
  F total = zero();
  for (int64_t c = 0; c < width; c += kLanes) total = fma(load(x + c), load(x + c), total);
  const F length = set(1.0f / std::sqrt(sum(total) + eps)), scaled = set(scale);
  for (int64_t c = 0; c < width; c += kLanes)
    store(x + c, mul(rounded_as<E>(mul(load(x + c), length)), scaled));
}

// lower_bound * sigmoid(slope (z + bias))
inline F log_decay(F z, F bias, float slope, float lower_bound) {
  return mul(set(lower_bound), sigmoid(mul(set(slope), add(z, bias))));
}

// Chunks are runs of rows; every row holds all heads.
inline void kda_decay(const DecayArgs& args) {
  const int64_t columns = args.heads * args.width, step = columns >= 4096 ? 1 : 4096 / columns;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.tokens + step - 1) / step, [&](int64_t chunk) {
      for (int64_t t = chunk * step; t < args.tokens && t < (chunk + 1) * step; ++t)
        for (int64_t head = 0; head < args.heads; ++head) {
          const float slope = std::exp(args.a_log[head]);
          const int64_t at = t * columns + head * args.width;
          for_vectors(args.width, [&](auto load, auto store, int64_t c) {
            const F bias = load(args.dt_bias + head * args.width + c);
            store(args.g + at + c,
                  log_decay(load(static_cast<const E*>(args.z) + at + c), bias, slope, args.lower_bound));
          });
        }
    });
  });
}

// One token: state [width(key), width(value)] <- diag(decay) state + k correction^T with
// correction = beta (v - state^T diag(decay) k), and o = state^T q of the new state. `scratch` holds 4 width floats.
//
// Two passes over the state, the first of which also forms what o takes from the old state; each row comes from memory
// once and from the second-level cache once. The second pass asks for the state `next`, if any, into that cache.
template <int64_t W>
void delta_step(float* state, const float* q, const float* k, const float* v, const float* decay, float beta,
                int64_t width_given, float* scratch, float* o, const float* next = nullptr) {
  const int64_t width = W > 0 ? W : width_given;
  float *decayed_k = scratch, *decayed_q = scratch + width, *seen = scratch + 2 * width;
  float* correction = scratch + 3 * width;
  F overlap = zero();
  for (int64_t c = 0; c < width; c += kLanes) {
    const F a = load(decay + c), key = load(k + c), query = load(q + c);
    store(decayed_k + c, mul(a, key));
    store(decayed_q + c, mul(a, query));
    store(seen + c, zero());
    store(o + c, zero());
    overlap = fma(key, query, overlap);
  }
  for (int64_t row = 0; row < width; row += 4) {
    const float* s = state + row * width;
    const F k0 = set(decayed_k[row]), k1 = set(decayed_k[row + 1]);
    const F k2 = set(decayed_k[row + 2]), k3 = set(decayed_k[row + 3]);
    const F q0 = set(decayed_q[row]), q1 = set(decayed_q[row + 1]);
    const F q2 = set(decayed_q[row + 2]), q3 = set(decayed_q[row + 3]);
    for (int64_t c = 0; c < width; c += kLanes) {
      const F s0 = load(s + c), s1 = load(s + width + c), s2 = load(s + 2 * width + c), s3 = load(s + 3 * width + c);
      store(seen + c, fma(k3, s3, fma(k2, s2, fma(k1, s1, fma(k0, s0, load(seen + c))))));
      store(o + c, fma(q3, s3, fma(q2, s2, fma(q1, s1, fma(q0, s0, load(o + c))))));
    }
  }
  const F written = set(sum(overlap));
  for (int64_t c = 0; c < width; c += kLanes) {
    const F change = mul(set(beta), sub(load(v + c), load(seen + c)));
    store(correction + c, change);
    store(o + c, fma(written, change, load(o + c)));
  }
  for (int64_t row = 0; row < width; row += 4) {
    float* s = state + row * width;
    if (next != nullptr)
      for (int64_t c = 0; c < 4 * width; c += kLineFloats) prefetch_far(next + row * width + c);
    const F a0 = set(decay[row]), a1 = set(decay[row + 1]), a2 = set(decay[row + 2]), a3 = set(decay[row + 3]);
    const F k0 = set(k[row]), k1 = set(k[row + 1]), k2 = set(k[row + 2]), k3 = set(k[row + 3]);
    for (int64_t c = 0; c < width; c += kLanes) {
      const F change = load(correction + c);
      store(s + c, fma(k0, change, mul(a0, load(s + c))));
      store(s + width + c, fma(k1, change, mul(a1, load(s + width + c))));
      store(s + 2 * width + c, fma(k2, change, mul(a2, load(s + 2 * width + c))));
      store(s + 3 * width + c, fma(k3, change, mul(a3, load(s + 3 * width + c))));
    }
  }
}

// One head of one sequence as the delta rule reads it, from token `t` on.
template <typename E>
struct HeadInputs {
  const KdaArgs& args;
  int64_t head;

  // Row `row` of q, k, v (normalised, q scaled) and the decay.
  void load_row(int64_t t, float* q, float* k, float* v, float* decay) const {
    const int64_t width = args.width, at = head * width;
    const E* q_from = static_cast<const E*>(args.q) + t * args.q_stride + at;
    const E* k_from = static_cast<const E*>(args.k) + t * args.k_stride + at;
    const E* v_from = static_cast<const E*>(args.v) + t * args.v_stride + at;
    const float* g = args.g + t * args.heads * width + at;
    for (int64_t c = 0; c < width; c += kLanes) {
      store(q + c, load(q_from + c));
      store(k + c, load(k_from + c));
      store(v + c, load(v_from + c));
      store(decay + c, exp(load(g + c)));
    }
    l2_normalise<E>(q, width, args.l2_eps, 1.0f / std::sqrt(static_cast<float>(width)));
    l2_normalise<E>(k, width, args.l2_eps, 1.0f);
  }

  float beta(int64_t t) const { return args.beta[t * args.heads + head]; }

  void store_row(int64_t t, const float* o) const {
    E* to = static_cast<E*>(args.o) + (t * args.heads + head) * args.width;
    for (int64_t c = 0; c < args.width; c += kLanes) store(to + c, load(o + c));
  }
};

// The state of a sequence's head, or null.
inline float* state_of(float* states, const Sequences& sequences, int64_t n, int64_t heads, int64_t head,
                       int64_t width) {
  return states == nullptr ? nullptr : states + (sequences.slots[n] * heads + head) * width * width;
}

// Chunks are (sequence, head).
inline void kda_recurrent(const KdaArgs& args) {
  const int64_t width = args.width;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    with_width(width, [&](auto constant) {
      parallel(args.sequences.count * args.heads, [&](int64_t chunk) {
        const int64_t n = chunk / args.heads, head = chunk % args.heads;
        const HeadInputs<E> inputs{args, head};
        Scratch scratch;
        auto *q = scratch.take<float>(width), *k = scratch.take<float>(width), *v = scratch.take<float>(width);
        auto *decay = scratch.take<float>(width), *o = scratch.take<float>(width);
        auto* step = scratch.take<float>(4 * width);
        float* state = state_of(args.state, args.sequences, n, args.heads, head, width);
        if (state == nullptr) {
          state = scratch.take<float>(width * width);
          std::memset(state, 0, sizeof(float) * width * width);
        }
        for (int64_t t = args.sequences.cu_seqlens[n]; t < args.sequences.cu_seqlens[n + 1]; ++t) {
          inputs.load_row(t, q, k, v, decay);
          delta_step<decltype(constant)::value>(state, q, k, v, decay, inputs.beta(t), width, step, o);
          inputs.store_row(t, o);
        }
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
