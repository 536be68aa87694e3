// Kernels whose rows have nothing to do with each other.
#include <algorithm>
#include <cmath>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

// Row by row: the numbers of x [rows, columns] with a stride, each made by `of(row)` into a row of the result.
static Numbers by_row(const Array& x, int64_t rows, int64_t columns, int64_t stride,
                      const std::function<Numbers(Numbers, int64_t)>& of) {
  Numbers y;
  for (int64_t row = 0; row < rows; ++row) {
    const Numbers own = of(numbers_of(x.type(), x.at(row * stride), columns), row);
    y.insert(y.end(), own.begin(), own.end());
  }
  return y;
}

static double mean_square(const Numbers& x) {
  double total = 0.0;
  for (double each : x) total += each * each;
  return total / static_cast<double>(x.size());
}

// rms(x), rounded, times weight
static Numbers rms_normed(Numbers x, Type type, const Numbers& weight) {
  const double length = std::sqrt(mean_square(x) + 1e-5);
  for (size_t i = 0; i < x.size(); ++i) x[i] = rounded_to(type, x[i] / length) * weight[i];
  return x;
}

static constexpr int64_t kWidths[] = {16, 48, 7168};

TEST(rms_norm) {
  std::mt19937 random(1);
  for (Type type : kActivations)
    for (int64_t columns : kWidths)
      for (int64_t rows : {0, 1, 37}) {
        const int64_t stride = columns + 16;
        const Array x = random_array(type, rows * stride, random), weight = random_array(type, columns, random);
        check_laws("rms_norm " + shown(type) + " " + std::to_string(columns), rows, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array y(type, count * columns);
                     kernels.rms_norm(
                         {x.at(first * stride), type, count, columns, stride, weight.data(), type, 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   },
                   {by_row(x, rows, columns, stride,
                           [&](Numbers own, int64_t) { return rms_normed(own, type, numbers_of(weight)); })});
      }
}

TEST(gated_rms_norm) {
  std::mt19937 random(2);
  for (Type type : kActivations)
    for (int64_t columns : {16, 48, 128})
      for (int64_t rows : {0, 1, 37}) {
        const Array x = random_array(type, rows * columns, random),
                    gate = random_array(type, rows * columns, random, 20);
        const Array weight = random_array(Type::f32, columns, random);
        const Numbers expected = by_row(x, rows, columns, columns, [&](Numbers own, int64_t row) {
          const double length = std::sqrt(mean_square(own) + 1e-5);
          for (int64_t c = 0; c < columns; ++c)
            own[c] = own[c] / length * weight.as<float>()[c] * sigmoid(number_of(type, gate.data(), row * columns + c));
          return own;
        });
        check_laws("gated_rms_norm " + shown(type) + " " + std::to_string(columns), rows, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array y(type, count * columns);
                     if (kernels.gated_rms_norm == nullptr) return std::vector<Output>{};
                     kernels.gated_rms_norm({x.at(first * columns), gate.at(first * columns), type, count, columns,
                                             weight.as<float>(), 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   },
                   {expected});
      }
}

TEST(layer_norm) {
  std::mt19937 random(3);
  for (Type type : kActivations)
    for (bool has_bias : {false, true})
      for (int64_t rows : {0, 1, 37}) {
        const int64_t columns = 48;
        const Array x = random_array(type, rows * columns, random), weight = random_array(type, columns, random);
        const Array bias = random_array(type, columns, random);
        const Numbers w = numbers_of(weight), b = numbers_of(bias);
        const Numbers expected = by_row(x, rows, columns, columns, [&](Numbers own, int64_t) {
          double mean = 0.0;
          for (double each : own) mean += each / static_cast<double>(columns);
          for (double& each : own) each -= mean;
          const double deviation = std::sqrt(mean_square(own) + 1e-5);
          for (int64_t c = 0; c < columns; ++c) own[c] = own[c] / deviation * w[c] + (has_bias ? b[c] : 0.0);
          return own;
        });
        check_laws("layer_norm " + shown(type), rows, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array y(type, count * columns);
                     if (kernels.layer_norm == nullptr) return std::vector<Output>{};
                     kernels.layer_norm({x.at(first * columns), type, count, columns, weight.data(),
                                         has_bias ? bias.data() : nullptr, type, 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   },
                   {expected});
      }
}

TEST(situ) {
  std::mt19937 random(4);
  for (Type type : kActivations)
    for (int64_t count : {0, 1, 15, 4099}) {
      const Array gate = random_array(type, count, random, 100), up = random_array(type, count, random, 100);
      Numbers expected;
      for (int64_t i = 0; i < count; ++i) {
        const double g = number_of(type, gate.data(), i), u = number_of(type, up.data(), i);
        expected.push_back(4.0 * std::tanh(g / 4.0) * sigmoid(g) * 25.0 * std::tanh(u / 25.0));
      }
      check_laws("situ " + shown(type), 1, tolerance_of(type),
                 [&](const Kernels& kernels, int64_t, int64_t) {
                   Array y(type, count);
                   kernels.situ({gate.data(), up.data(), type, count, 4.0f, 25.0f, y.data()});
                   return std::vector<Output>{output(y)};
                 },
                 {expected});
    }
}

TEST(attn_res_mix) {
  std::mt19937 random(5);
  for (Type type : kActivations)
    for (int64_t columns : kWidths)
      for (int64_t num_candidates : {1, 2, 9})
        for (int64_t tokens : {0, 1, 17}) {
          std::vector<Array> candidates;
          for (int64_t i = 0; i < num_candidates; ++i)
            candidates.push_back(random_array(type, tokens * columns, random));
          const Array query = random_array(Type::f32, columns, random, 0.2f),
                      weight = random_array(type, columns, random);
          const Numbers q = numbers_of(query), w = numbers_of(weight);
          const Numbers expected = by_row(candidates[0], tokens, columns, columns, [&](Numbers, int64_t token) {
            Numbers scores, mix(static_cast<size_t>(columns), 0.0);
            for (const Array& candidate : candidates) {
              const Numbers own = numbers_of(type, candidate.at(token * columns), columns);
              double score = 0.0;
              for (int64_t c = 0; c < columns; ++c) score += own[c] * q[c];
              scores.push_back(score / std::sqrt(mean_square(own) + 1e-5));
            }
            softmax(scores);
            for (int64_t i = 0; i < num_candidates; ++i)
              for (int64_t c = 0; c < columns; ++c)
                mix[c] += scores[i] * number_of(type, candidates[i].data(), token * columns + c);
            for (double& each : mix) each = rounded_to(type, each);
            return rms_normed(mix, type, w);
          });
          check_laws("attn_res_mix " + shown(type) + " " + std::to_string(columns), tokens, tolerance_of(type),
                     [&](const Kernels& kernels, int64_t first, int64_t count) {
                       std::vector<const void*> rows;
                       for (const Array& candidate : candidates) rows.push_back(candidate.at(first * columns));
                       Array y(type, count * columns);
                       kernels.attn_res_mix({rows.data(), num_candidates, type, count, columns, query.as<float>(),
                                             weight.data(), type, 1e-5f, y.data()});
                       return std::vector<Output>{output(y)};
                     },
                     {expected});
        }
}

TEST(quantize_rows) {
  std::mt19937 random(6);
  for (Type type : kActivations)
    for (Type to : {Type::i8, Type::f8})
      for (int64_t columns : kWidths) {
        const int64_t rows = 5;
        const Array x = random_array(type, rows * columns, random);
        Numbers values, scales;
        by_row(x, rows, columns, columns, [&](Numbers own, int64_t) {
          double most = 1e-30;
          for (double each : own) most = std::max(most, std::fabs(each));
          const float limit = to == Type::i8 ? 127.0f : 448.0f, factor = limit / static_cast<float>(most);
          for (double each : own) values.push_back(static_cast<int8_t>(to_code(to, static_cast<float>(each) * factor)));
          scales.push_back(most / limit);
          return Numbers{};
        });
        check_laws("quantize_rows " + shown(type) + " " + shown(to), rows, kFloat32,
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array values(Type::i8, count * columns), scales(Type::f32, count);
                     kernels.quantize_rows(
                         {x.at(first * columns), type, count, columns, to, values.data(), scales.as<float>()});
                     return std::vector<Output>{output(values), output(scales)};
                   },
                   {values, scales});
      }
}
