// From logits to tokens: penalties, mask, temperature, top-k, top-p, min-p, draw.
//
// Every number that a choice depends on is the same under all instruction sets and in the reference: e^x is made of
// separately rounded multiplications and additions, and probabilities are whole numbers, whose sums have no order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

// Below and above these a softmax in float32 is already an argmax or a uniform choice.
constexpr double kLowestTemperature = 1e-6, kHighestTemperature = 1e30;

// e^x for x <= 0 without fused multiply-adds; exactly 1 at 0.
inline F exp_in_steps(F x) {
  const F clamped = max(set(-87.0f), x);
  const F n = nearest(mul(clamped, set(1.44269504088896341f)));
  F r = sub(clamped, mul(n, set(0.693359375f)));
  r = add(r, mul(n, set(2.12194440e-4f)));
  F p = set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = add(mul(p, r), set(c));
  p = add(add(mul(p, mul(r, r)), r), set(1.0f));
  return mul(p, power_of_two(n));
}

// A weight of at most 1 as a whole number; what is below 2^-40 counts nothing.
inline int64_t mass_of(float weight) { return static_cast<int64_t>(weight * 0x1p40f); }

// Values of at most 0 in falling order are these in rising order.
inline uint32_t key_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x7fffffffu;
}

constexpr uint32_t kLargestKey = 0x7fffffffu;

// The order of tokens: falling value, then rising id.
struct Rank {
  uint32_t key;
  int64_t id;
  bool operator<(const Rank& other) const { return key != other.key ? key < other.key : id < other.id; }
};

// One row: values scaled by the temperature with the best at 0, their weights e^value, and the last token that is kept.
class SampledRow {
 public:
  SampledRow(const float* values, float* weights, int64_t size, Scratch& scratch)
      : values_(values), weights_(weights), size_(size), scratch_(scratch) {}

  void keep_top_k(int64_t count) {
    fill_buckets();
    int64_t before = 0, bucket = 0, mass = 0;
    for (; before + counts_[bucket] < count; ++bucket) {
      before += counts_[bucket];
      mass += masses_[bucket];
    }
    const Rank* rank = ranked(bucket);
    for (const Rank* end = rank + (count - before); rank < end; ++rank) mass += mass_of(weights_[rank->id]);
    last_ = rank[-1];
    kept_mass_ = mass;
  }

  // The first tokens whose mass reaches `share` of what is kept so far.
  void keep_top_p(double share) {
    fill_buckets();
    const double wanted = share * static_cast<double>(kept_mass_);
    int64_t reached = 0, bucket = 0;
    for (; static_cast<double>(reached + masses_[bucket]) < wanted && bucket < bucket_of(last_); ++bucket)
      reached += masses_[bucket];
    for (const Rank* rank = ranked(bucket);; ++rank) {
      reached += mass_of(weights_[rank->id]);
      if (static_cast<double>(reached) < wanted && *rank < last_) continue;
      last_ = *rank;
      return;
    }
  }

  // Only tokens that weigh at least this much.
  void drop_below(float least_weight) {
    for_vectors(size_, [&](auto load, auto store, int64_t i) {
      const F weight = load(weights_ + i);
      store(weights_ + i, select_less(weight, set(least_weight), zero(), weight));
    });
  }

  // Tokens behind the last one that is kept weigh nothing from now on.
  void drop_others() {
    for (int64_t id = 0; id < size_; ++id)
      if (last_ < rank_of(id)) weights_[id] = 0.0f;
  }

  // The token at which the mass, in order of the ids, passes `uniform` times all of it.
  int64_t draw(double uniform) const {
    const int64_t num_blocks = (size_ + kBlockSize - 1) / kBlockSize;
    int64_t* masses = scratch_.take<int64_t>(num_blocks);
    int64_t total = 0, reached = 0, block = 0;
    for (int64_t i = 0; i < num_blocks; ++i)
      total += masses[i] = mass_between(i * kBlockSize, std::min((i + 1) * kBlockSize, size_));
    const int64_t mark = std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
    while (reached + masses[block] <= mark) reached += masses[block++];
    int64_t id = block * kBlockSize;
    while ((reached += mass_of(weights_[id])) <= mark) ++id;
    return id;
  }

 private:
  static constexpr int kShift = 16;
  static constexpr int64_t kBuckets = int64_t{1} << (31 - kShift), kBlockSize = 1024;

  static int64_t bucket_of(const Rank& rank) { return rank.key >> kShift; }
  Rank rank_of(int64_t id) const { return {key_of(values_[id]), id}; }

  int64_t mass_between(int64_t first, int64_t end) const {
    int64_t total = 0;
    for (int64_t id = first; id < end; ++id) total += mass_of(weights_[id]);
    return total;
  }

  void fill_buckets() {
    if (counts_ != nullptr) return;
    counts_ = scratch_.take<int64_t>(kBuckets);
    masses_ = scratch_.take<int64_t>(kBuckets);
    std::fill_n(counts_, kBuckets, 0);
    std::fill_n(masses_, kBuckets, 0);
    kept_mass_ = 0;
    for (int64_t id = 0; id < size_; ++id) {
      const int64_t bucket = bucket_of(rank_of(id)), mass = mass_of(weights_[id]);
      ++counts_[bucket];
      masses_[bucket] += mass;
      kept_mass_ += mass;
    }
  }

  // The tokens of a bucket in order.
  const Rank* ranked(int64_t bucket) {
    Rank* found = scratch_.take<Rank>(counts_[bucket]);
    int64_t count = 0;
    for (int64_t id = 0; id < size_; ++id)
      if (bucket_of(rank_of(id)) == bucket) found[count++] = rank_of(id);
    std::sort(found, found + count);
    return found;
  }

  const float* values_;
  float* weights_;
  int64_t size_;
  Scratch& scratch_;
  Rank last_{kLargestKey, INT64_MAX};
  int64_t kept_mass_ = 0;
  int64_t* counts_ = nullptr;  // by bucket: the upper bits of the key
  int64_t* masses_ = nullptr;
};

// The largest value, NaN where there is one.
inline float best_of(const float* values, int64_t size) {
  F most = set(-INFINITY), odd = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F v = load(values + i);
    most = max(v, most);                                       // a NaN gives way to `most`
    odd = add(odd, select_less(v, set(INFINITY), zero(), v));  // and stays here, as plus infinity does
  }
  float best = largest(most);
  bool has_nan = false;
  if (sum(odd) != 0.0f)
    for (int64_t j = 0; j < i; ++j) has_nan = has_nan || values[j] != values[j];
  for (; i < size; ++i) {
    has_nan = has_nan || values[i] != values[i];
    best = values[i] > best ? values[i] : best;
  }
  return has_nan ? NAN : best;
}

// Widens a row; tokens whose bit of the mask is not set become minus infinity.
template <typename E>
void allowed_logits(const E* logits, const int32_t* mask, int64_t size, float* values) {
  for_vectors(size, [&](auto load, auto store, int64_t i) { store(values + i, load(logits + i)); });
  if (mask == nullptr) return;
  for (int64_t word = 0; word * 32 < size; ++word) {
    const uint32_t bits = static_cast<uint32_t>(mask[word]);
    if (bits == UINT32_MAX) continue;
    const int64_t end = std::min(word * 32 + 32, size);
    for (int64_t id = word * 32; id < end; ++id)
      if ((bits >> (id - word * 32) & 1) == 0) values[id] = -INFINITY;
  }
}

template <typename E>
void sample_row(const SampleArgs& args, int64_t row) {
  Scratch scratch;
  const int64_t size = args.columns, words = (size + 31) / 32;
  float* values = scratch.take<float>(size);
  allowed_logits(static_cast<const E*>(args.logits) + row * size, args.mask == nullptr ? nullptr : args.mask + row * words,
                 size, values);
  const double* settings = args.settings + row * kSampleSettings;
  const float best = args.best[row] = best_of(values, size);
  int64_t* masses = args.masses == nullptr ? nullptr : args.masses + row * size;
  if (masses != nullptr) std::fill_n(masses, size, 0);
  args.ids[row] = -1;
  if (!std::isfinite(best)) return;
  if (settings[0] == 0) {
    const int64_t id = args.ids[row] = std::find(values, values + size, best) - values;
    if (masses != nullptr) masses[id] = 1;
    return;
  }
  const F temperature = set(static_cast<float>(std::clamp(settings[0], kLowestTemperature, kHighestTemperature)));
  float* weights = scratch.take<float>(size);
  for_vectors(size, [&](auto load, auto store, int64_t i) {
    const F value = div(sub(load(values + i), set(best)), temperature);
    store(values + i, value);
    store(weights + i, exp_in_steps(value));
  });
  SampledRow sampled(values, weights, size, scratch);
  const double top_k = settings[1], top_p = settings[2];
  if (0 < top_k && top_k < static_cast<double>(size)) sampled.keep_top_k(static_cast<int64_t>(top_k));
  if (top_p < 1) sampled.keep_top_p(top_p);
  if (top_k > 0 || top_p < 1) sampled.drop_others();
  if (settings[3] > 0) sampled.drop_below(static_cast<float>(settings[3]));
  args.ids[row] = sampled.draw(settings[4]);
  if (masses != nullptr) std::transform(weights, weights + size, masses, mass_of);
}

inline void sample_tokens(const SampleArgs& args) {
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel(args.rows, [&](int64_t row) { sample_row<E>(args, row); });
  });
}

inline void penalize(const PenaltyArgs& args) {
  for (int64_t i = 0; i < args.count; ++i)
    if (args.ids[i] < 0 || args.ids[i] >= args.columns) throw std::out_of_range("penalize: an id is outside the vocabulary");
  Scratch scratch;
  // how often a token stands in the output; -1 for what is not seen at all
  int32_t* times = scratch.take<int32_t>(args.columns);
  for (int64_t i = 0; i < args.count; ++i) times[args.ids[i]] = 0;
  for (int64_t i = args.num_prompt; i < args.count; ++i) ++times[args.ids[i]];
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t id = args.ids[i];
    const int32_t count = times[id];
    if (count < 0) continue;  // done
    float value = args.logits[id];
    value = value > 0 ? value / args.repetition : value * args.repetition;
    if (count > 0) value -= args.frequency * static_cast<float>(count) + args.presence;
    args.logits[id] = value;
    times[id] = -1;
  }
}

}  // namespace perilune::PERILUNE_ISA
