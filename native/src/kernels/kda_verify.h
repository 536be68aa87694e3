// KDA over tokens that may be taken back: a pass that leaves the states alone and records what it did, and the commit of
// the first tokens of each sequence to the states of all layers.
//
// The commit repeats the state's update of `delta_step` with the same operands in the same order, so the states are
// those of plain steps to the bit.
#pragma once

#include "kernels/kda_mix.h"

namespace perilune::PERILUNE_ISA {

// Chunks are (sequence, head).
inline void kda_verify(const KdaVerifyArgs& args) {
  const KdaMixArgs& mix = args.mix;
  const Sequences& sequences = mix.sequences;
  with_element(mix.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    with_chunk_form(mix.width, [&](auto constant, auto vectors) {
      parallel(sequences.count * mix.heads, [&](int64_t chunk) {
        const int64_t n = chunk / mix.heads;
        HeadMix<E, decltype(constant)::value, decltype(vectors)::value>(mix, n, chunk % mix.heads)
            .verify(sequences.cu_seqlens[n], sequences.cu_seqlens[n + 1], args.records);
      });
    });
  });
}

// state [width, width] takes `count` updates of a head, whose records lie `stride` apart.
template <typename E>
void repeat_updates(const E* keys, const float* decays, const float* corrections, int64_t count, int64_t stride,
                    int64_t width, float* state) {
  for (int64_t row = 0; row < width; ++row)
    for (int64_t c = 0; c < width; c += kLanes) {
      F s = load(state + row * width + c);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i * stride;
        s = fma(set(widen(keys[at + row])), load(corrections + at + c), mul(set(decays[at + row]), s));
      }
      store(state + row * width + c, s);
    }
}

// window [history, channels]: the last inputs after `count` more, inputs [count, channels], `width` columns of each.
template <typename E, typename S>
void shift_window(const E* inputs, int64_t count, int64_t history, int64_t channels, int64_t width, S* window) {
  for (int64_t row = 0; row < history; ++row) {
    const int64_t from = row + count;
    for (int64_t c = 0; c < width; c += kLanes)
      store(window + row * channels + c, from < history
                                             ? rounded_as<E>(load(window + from * channels + c))
                                             : load(inputs + (from - history) * channels + c));
  }
}

// Chunks are (layer, sequence, head).
inline void kda_commit(const KdaCommitArgs& args) {
  const int64_t width = args.width, hidden = args.heads * width, channels = 3 * hidden, history = args.taps - 1;
  const Sequences& sequences = args.sequences;
  for (int64_t n = 0; n < sequences.count; ++n)
    if (args.counts[n] < 0 || args.counts[n] > sequences.cu_seqlens[n + 1] - sequences.cu_seqlens[n])
      throw std::out_of_range("kda_commit: more tokens than the pass had");
  with_elements(args.type, args.conv_type, [&](auto* e, auto* s) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
    parallel(args.layers * sequences.count * args.heads, [&](int64_t chunk) {
      const int64_t head = chunk % args.heads, n = chunk / args.heads % sequences.count;
      const int64_t layer = chunk / args.heads / sequences.count, count = args.counts[n];
      if (count == 0) return;
      const int64_t seat = layer * args.num_slots + sequences.slots[n];
      const int64_t first = layer * args.rows + sequences.cu_seqlens[n], at = first * hidden + head * width;
      repeat_updates(static_cast<const E*>(args.records.keys) + at, args.records.decays + at,
                     args.records.corrections + at, count, hidden, width,
                     args.state + (seat * args.heads + head) * width * width);
      for (int64_t stream = 0; stream < 3; ++stream) {
        const int64_t column = stream * hidden + head * width;
        shift_window(static_cast<const E*>(args.records.inputs) + first * channels + column, count, history, channels,
                     width, static_cast<S*>(args.conv_state) + seat * history * channels + column);
      }
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
