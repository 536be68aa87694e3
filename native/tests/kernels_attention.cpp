// Latent attention over paged rows, plain and absorbed, dense and selected; attention among patches.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

// Sums of float32 and their exp, against double precision; and of bf16, where queries, keys, probabilities and sums are
// rounded on the way, in other places than the numbers they are compared with.
static double attention_tolerance(Type type) { return type == Type::f32 ? 5e-5 : 3e-2; }

struct MlaSizes {
  Tokens tokens;
  std::vector<int64_t> seq_lens;
  int64_t heads, key, shared, latent, value, block_size, topk;  // topk 0: every visible row
};

// One call's arrays, with strides of their own for queries and weights.
struct MlaCase {
  const MlaSizes& sizes;
  Type type, row_type;
  int64_t num_sequences, num_tokens, q_stride, uk_stride, uv_stride;
  Array q, w_uk, w_uv;
  PagedRows rows;
  std::vector<int64_t> selected;

  MlaCase(const MlaSizes& given, Type type, Type row_type, std::mt19937& random)
      : sizes(given),
        type(type),
        row_type(row_type),
        num_sequences(static_cast<int64_t>(given.seq_lens.size())),
        num_tokens(given.tokens.before(num_sequences)),
        q_stride(given.heads * (given.key + given.shared) + 16),
        uk_stride(given.key * given.latent + 32),
        uv_stride(given.value * given.latent + 48),
        q(random_array(type, num_tokens * q_stride - 16, random, 3)),
        w_uk(random_array(type, given.heads * uk_stride - 32, random,
                          2.0f / std::sqrt(static_cast<float>(given.latent)))),
        w_uv(random_array(type, given.heads * uv_stride - 48, random,
                          2.0f / std::sqrt(static_cast<float>(given.latent)))),
        rows(row_type, given.latent, given.latent + given.shared, given.block_size, given.seq_lens, random,
             [&](int64_t, int64_t) { return numbers_of(random_array(type, given.latent + given.shared, random, 2)); }) {
    for (int64_t n = 0; given.topk > 0 && n < num_sequences; ++n)
      for (int64_t i = 0; i < given.tokens.counts[n]; ++i) {
        std::vector<int64_t> positions(static_cast<size_t>(visible(n, i)));
        std::iota(positions.begin(), positions.end(), 0);
        std::shuffle(positions.begin(), positions.end(), random);
        positions.resize(std::min(positions.size(), static_cast<size_t>(given.topk)));
        if (i % 2 == 0) std::sort(positions.begin(), positions.end());
        positions.resize(static_cast<size_t>(given.topk), -1);
        selected.insert(selected.end(), positions.begin(), positions.end());
      }
  }

  int64_t visible(int64_t n, int64_t i) const { return sizes.seq_lens[n] - sizes.tokens.counts[n] + i + 1; }

  // The rows that token i of sequence n attends to.
  std::vector<int64_t> seen(int64_t n, int64_t i) const {
    std::vector<int64_t> positions;
    if (sizes.topk == 0) {
      positions.resize(static_cast<size_t>(visible(n, i)));
      std::iota(positions.begin(), positions.end(), 0);
    }
    const int64_t token = sizes.tokens.before(n) + i;
    for (int64_t k = 0; k < sizes.topk; ++k)
      if (selected[token * sizes.topk + k] >= 0) positions.push_back(selected[token * sizes.topk + k]);
    return positions;
  }

  Output call(void (*kernel)(const MlaArgs&), int64_t first, int64_t count) const {
    const int64_t before = sizes.tokens.before(first);
    const std::vector<int64_t> bounds = sizes.tokens.bounds(first, count);
    Array o(type, bounds.back() * sizes.heads * sizes.value);
    kernel({q.at(before * q_stride),
            type,
            q_stride,
            rows.pages(first),
            row_type,
            {bounds.data(), nullptr, count},
            w_uk.data(),
            w_uv.data(),
            type,
            uk_stride,
            uv_stride,
            sizes.heads,
            sizes.key,
            sizes.shared,
            sizes.latent,
            sizes.value,
            scale(),
            sizes.topk > 0 ? selected.data() + before * sizes.topk : nullptr,
            sizes.topk,
            o.data()});
    return output(o);
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(sizes.key + sizes.shared)); }
};

// One query of one head: o [value].
static Numbers attend(const MlaCase& given, int64_t n, int64_t i, int64_t head) {
  const MlaSizes& sizes = given.sizes;
  const int64_t at = (sizes.tokens.before(n) + i) * given.q_stride + head * (sizes.key + sizes.shared);
  const Numbers q = numbers_of(given.type, given.q.at(at), sizes.key + sizes.shared);
  const Numbers w_uk = numbers_of(given.type, given.w_uk.at(head * given.uk_stride), sizes.key * sizes.latent);
  const Numbers w_uv = numbers_of(given.type, given.w_uv.at(head * given.uv_stride), sizes.value * sizes.latent);
  Numbers latent_q(static_cast<size_t>(sizes.latent), 0.0);
  for (int64_t d = 0; d < sizes.key; ++d)
    for (int64_t r = 0; r < sizes.latent; ++r) latent_q[r] += q[d] * w_uk[d * sizes.latent + r];
  const std::vector<int64_t> positions = given.seen(n, i);
  Numbers scores;
  for (int64_t position : positions) {
    const Numbers& row = given.rows.row(n, position);
    double score = std::inner_product(latent_q.begin(), latent_q.end(), row.begin(), 0.0);
    for (int64_t e = 0; e < sizes.shared; ++e) score += q[sizes.key + e] * row[sizes.latent + e];
    scores.push_back(score * given.scale());
  }
  softmax(scores);
  Numbers context(static_cast<size_t>(sizes.latent), 0.0), o;
  for (size_t s = 0; s < positions.size(); ++s)
    for (int64_t r = 0; r < sizes.latent; ++r) context[r] += scores[s] * given.rows.row(n, positions[s])[r];
  for (int64_t v = 0; v < sizes.value; ++v)
    o.push_back(std::inner_product(context.begin(), context.end(), w_uv.begin() + v * sizes.latent, 0.0));
  return o;
}

static void check_mla(Type type, Type row_type, const MlaSizes& sizes) {
  std::mt19937 random(33);
  const MlaCase given(sizes, type, row_type, random);
  Numbers expected;
  for (int64_t n = 0; n < given.num_sequences; ++n)
    for (int64_t i = 0; i < sizes.tokens.counts[n]; ++i)
      for (int64_t head = 0; head < sizes.heads; ++head)
        for (double x : attend(given, n, i, head)) expected.push_back(x);
  const std::string sizes_shown = shown(type) + " by " + shown(row_type) + " rows, " + std::to_string(sizes.heads) +
                                  " heads, top " + std::to_string(sizes.topk);
  for (auto kernel : {&Kernels::mla_decode, &Kernels::mla_prefill})
    check_laws((kernel == &Kernels::mla_decode ? "mla_decode " : "mla_prefill ") + sizes_shown, given.num_sequences,
               attention_tolerance(type),
               [&](const Kernels& kernels, int64_t first, int64_t count) {
                 return std::vector<Output>{given.call(kernels.*kernel, first, count)};
               },
               {expected});
}

TEST(mla) {
  const Tokens mixed{{1, 3, 7}};
  for (Type type : kActivations)
    for (Type row_type : {type, Type::i8, Type::f8}) {
      check_mla(type, row_type, {mixed, {9, 3, 40}, 3, 32, 16, 48, 32, 4, 0});
      check_mla(type, row_type, {mixed, {96, 3, 97}, 3, 16, 32, 144, 80, 16, 0});  // blocks of 96 keys, groups of 128
      check_mla(type, row_type, {{{1, 2}}, {95, 194}, 19, 16, 16, 16, 16, 64, 0});
      check_mla(type, row_type, {{{1}}, {1600}, 2, 16, 16, 16, 16, 64, 0});  // several ranges of 768
      check_mla(type, row_type, {mixed, {9, 3, 40}, 3, 32, 16, 48, 32, 4, 5});
      check_mla(type, row_type, {{{1, 2}}, {250, 190}, 2, 16, 16, 48, 16, 8, 101});
      check_mla(type, row_type, {{{1}}, {1100}, 1, 16, 16, 32, 16, 4, 1});
      check_mla(type, row_type, {{{101}}, {101}, 1, 16, 16, 16, 16, 101, 0});  // more queries than share keys
    }
}

TEST(mla_of_k3) {
  for (Type type : kActivations)
    for (Type row_type : {type, Type::f8}) check_mla(type, row_type, {{{1, 2}}, {50, 8}, 2, 128, 64, 512, 128, 16, 0});
}

// Queries [first, end) of the pictures that `bounds` part.
static Numbers patch_reference(const PatchAttentionArgs& args, const Array& qkv) {
  const int64_t width = args.width;
  const auto row = [&](int64_t patch, int64_t part, int64_t head) {
    Numbers x = numbers_of(args.type, qkv.at(((patch * 3 + part) * args.heads + head) * width), width);
    for (int64_t c = 0; part < 2 && c < width; c += 2) {
      const double cosine = args.cos[(patch * width + c) / 2], sine = args.sin[(patch * width + c) / 2], a = x[c],
                   b = x[c + 1];
      x[c] = rounded_to(args.type, a * cosine - b * sine);
      x[c + 1] = rounded_to(args.type, a * sine + b * cosine);
    }
    return x;
  };
  Numbers o;
  for (int64_t patch = args.first; patch < args.end; ++patch) {
    const int64_t* stop = std::upper_bound(args.cu_seqlens, args.cu_seqlens + args.count + 1, patch);
    for (int64_t head = 0; head < args.heads; ++head) {
      const Numbers q = row(patch, 0, head);
      Numbers scores, context(static_cast<size_t>(width), 0.0);
      for (int64_t other = stop[-1]; other < *stop; ++other) {
        const Numbers k = row(other, 1, head);
        scores.push_back(args.scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0));
      }
      softmax(scores);
      for (int64_t other = stop[-1]; other < *stop; ++other) {
        const Numbers v = row(other, 2, head);
        for (int64_t c = 0; c < width; ++c) context[c] += scores[other - stop[-1]] * v[c];
      }
      o.insert(o.end(), context.begin(), context.end());
    }
  }
  return o;
}

TEST(patch_attention) {
  std::mt19937 random(34);
  for (Type type : kActivations)
    for (auto [heads, width] : {std::pair<int64_t, int64_t>{3, 16}, {1, 48}, {2, 80}})
      for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0, 1}, {0, 96, 97, 200}, {0, 35, 35, 240}}) {
        const int64_t patches = bounds.back(), count = static_cast<int64_t>(bounds.size()) - 1;
        const Array qkv = random_array(type, patches * 3 * heads * width, random, 2);
        Array cos(Type::f32, patches * width / 2), sin(Type::f32, patches * width / 2);
        for (int64_t i = 0; i < patches * width / 2; ++i) {
          const double angle = static_cast<double>(random() % 1000);
          cos.as<float>()[i] = static_cast<float>(std::cos(angle)),
          sin.as<float>()[i] = static_cast<float>(std::sin(angle));
        }
        const auto args = [&](int64_t first, int64_t end, void* o) {
          return PatchAttentionArgs{
              qkv.data(), type,  heads, width, cos.as<float>(), sin.as<float>(), bounds.data(), count,
              0.3f,       first, end,   o};
        };
        check_laws("patch_attention " + shown(type) + " " + std::to_string(width), patches, attention_tolerance(type),
                   [&](const Kernels& kernels, int64_t first, int64_t number) {
                     Array o(type, number * heads * width);
                     kernels.patch_attention(args(first, first + number, o.data()));
                     return std::vector<Output>{output(o)};
                   },
                   {patch_reference(args(0, patches, nullptr), qkv)});
      }
}

TEST(gelu_tanh) {
  std::mt19937 random(35);
  for (Type type : kActivations)
    for (int64_t count : {0, 1, 15, 16387}) {
      const Array x = random_array(type, count, random, 9);
      Numbers expected;
      for (double v : numbers_of(x))
        expected.push_back(v / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v))));
      check_laws("gelu_tanh " + shown(type), 1, tolerance_of(type),
                 [&](const Kernels& kernels, int64_t, int64_t) {
                   Array y(type, count);
                   kernels.gelu_tanh({x.data(), type, count, y.data()});
                   return std::vector<Output>{output(y)};
                 },
                 {expected});
    }
}
