// Kernels whose rows have nothing to do with each other.
#include "check.h"

using namespace perilune;
using namespace perilune::tests;

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
                     kernels.rms_norm({x.at(first * stride), type, count, columns, stride, weight.data(), type, 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   });
      }
}

TEST(gated_rms_norm) {
  std::mt19937 random(2);
  for (Type type : kActivations)
    for (int64_t columns : {16, 48, 128})
      for (int64_t rows : {0, 1, 37}) {
        const Array x = random_array(type, rows * columns, random), gate = random_array(type, rows * columns, random, 20);
        const Array weight = random_array(Type::f32, columns, random);
        check_laws("gated_rms_norm " + shown(type) + " " + std::to_string(columns), rows, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array y(type, count * columns);
                     if (kernels.gated_rms_norm == nullptr) return std::vector<Output>{};
                     kernels.gated_rms_norm({x.at(first * columns), gate.at(first * columns), type, count, columns,
                                             weight.as<float>(), 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   });
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
        check_laws("layer_norm " + shown(type), rows, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array y(type, count * columns);
                     if (kernels.layer_norm == nullptr) return std::vector<Output>{};
                     kernels.layer_norm({x.at(first * columns), type, count, columns, weight.data(),
                                         has_bias ? bias.data() : nullptr, type, 1e-5f, y.data()});
                     return std::vector<Output>{output(y)};
                   });
      }
}

TEST(situ) {
  std::mt19937 random(4);
  for (Type type : kActivations)
    for (int64_t count : {0, 1, 15, 4099}) {
      const Array gate = random_array(type, count, random, 100), up = random_array(type, count, random, 100);
      check_laws("situ " + shown(type), 1, tolerance_of(type), [&](const Kernels& kernels, int64_t, int64_t) {
        Array y(type, count);
        kernels.situ({gate.data(), up.data(), type, count, 4.0f, 25.0f, y.data()});
        return std::vector<Output>{output(y)};
      });
    }
}

TEST(attn_res_mix) {
  std::mt19937 random(5);
  for (Type type : kActivations)
    for (int64_t columns : kWidths)
      for (int64_t num_candidates : {1, 2, 9})
        for (int64_t tokens : {0, 1, 17}) {
          std::vector<Array> candidates;
          for (int64_t i = 0; i < num_candidates; ++i) candidates.push_back(random_array(type, tokens * columns, random));
          const Array query = random_array(Type::f32, columns, random, 0.2f), weight = random_array(type, columns, random);
          check_laws("attn_res_mix " + shown(type) + " " + std::to_string(columns), tokens, tolerance_of(type),
                     [&](const Kernels& kernels, int64_t first, int64_t count) {
                       std::vector<const void*> rows;
                       for (const Array& candidate : candidates) rows.push_back(candidate.at(first * columns));
                       Array y(type, count * columns);
                       kernels.attn_res_mix({rows.data(), num_candidates, type, count, columns, query.as<float>(),
                                             weight.data(), type, 1e-5f, y.data()});
                       return std::vector<Output>{output(y)};
                     });
        }
}

TEST(quantize_rows) {
  std::mt19937 random(6);
  for (Type type : kActivations)
    for (Type to : {Type::i8, Type::f8})
      for (int64_t columns : kWidths) {
        const int64_t rows = 5;
        const Array x = random_array(type, rows * columns, random);
        check_laws("quantize_rows " + shown(type) + " " + shown(to), rows, kFloat32,
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array values(Type::i8, count * columns), scales(Type::f32, count);
                     kernels.quantize_rows({x.at(first * columns), type, count, columns, to, values.data(), scales.as<float>()});
                     return std::vector<Output>{output(values), output(scales)};
                   });
      }
}
