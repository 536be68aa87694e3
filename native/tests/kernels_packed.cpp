// Rows of 8 and 4 bits: how they are packed; and the indexer, which reads them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

static void put(const Array& array, int64_t i, float x) {
  if (array.type() == Type::f32)
    array.as<float>()[i] = x;
  else  // these values are their upper halves
    std::memcpy(array.as<char>() + 2 * i, reinterpret_cast<const char*>(&x) + 2, 2);
}

// Rows of all sizes: magnitudes far apart, zeros, signs of zero, the largest of a group on a border, not finite.
static Array awkward_rows(Type type, int64_t rows, int64_t columns, std::mt19937& random) {
  Array x = random_array(type, rows * columns, random, 3);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * columns, group = static_cast<int64_t>(random() % static_cast<uint64_t>(columns / 16)) * 16;
    const float magnitude = std::ldexp(1.0f, static_cast<int>(random() % 60) - 30);
    for (int64_t i = 0; i < columns; ++i)
      put(x, at + i, static_cast<float>(number_of(type, x.data(), at + i)) * magnitude);
    const float values[] = {0.0f, -0.0f, 127.0f, 448.0f, 7.0f, 6.0f, INFINITY, NAN, 1e-38f, 4e-7f};
    if (row % 3 == 1)
      for (int64_t i = 0; i < 16; ++i) put(x, at + group + i, i % 2 == 0 ? values[row % 10] : -values[row % 10]);
    if (row % 3 == 2)
      for (int64_t i = 0; i < columns; ++i) put(x, at + i, i % 32 == 31 ? values[row % 10] : 0.0f);
  }
  return x;
}

TEST(store_packed_rows) {
  std::mt19937 random(31);
  for (Type type : kActivations)
    for (Type to : {Type::i8, Type::f8, Type::mxfp4})
      for (auto [scaled, columns] :
           {std::pair<int64_t, int64_t>{32, 32}, {160, 160}, {48, 64}, {144, 160}, {512, 576}}) {
        if (to == Type::mxfp4 && scaled != columns) continue;  // it has no place for further columns
        const int64_t tokens = 41, num_rows = 50, row_bytes = packed_bytes(to, scaled, columns);
        const Array x = awkward_rows(type, tokens, columns, random);
        std::vector<int64_t> slots;
        Array expected(Type::i8, num_rows * row_bytes);
        for (int64_t token = 0; token < tokens; ++token) {
          slots.push_back(token == 7 ? slots[3] : token == 0 ? num_rows - 1 : token * 27 % num_rows);
          const std::vector<uint8_t> row = pack_row(numbers_of(type, x.at(token * columns), columns), scaled, to);
          std::memcpy(expected.as<char>() + slots.back() * row_bytes, row.data(), row.size());
        }
        check_laws("store_packed_rows " + shown(type) + " " + shown(to) + " " + std::to_string(scaled), 1, 0.0,
                   [&](const Kernels& kernels, int64_t, int64_t) {
                     Array pool(Type::i8, num_rows * row_bytes);
                     kernels.store_packed_rows(
                         {x.data(), type, tokens, columns, scaled, slots.data(), pool.data(), to, row_bytes, num_rows});
                     return std::vector<Output>{output(pool)};
                   },
                   {numbers_of(expected)});
      }
}

// Small integers: every sum is exact, whatever its order and the type of the keys, and there are ties.
static Numbers integers(int64_t count, std::mt19937& random) {
  Numbers numbers;
  for (int64_t i = 0; i < count; ++i) numbers.push_back(static_cast<double>(random() % 5) - 2.0);
  return numbers;
}

static Array array_of(Type type, const Numbers& numbers) {
  Array array(type, static_cast<int64_t>(numbers.size()));
  for (size_t i = 0; i < numbers.size(); ++i) put(array, static_cast<int64_t>(i), static_cast<float>(numbers[i]));
  return array;
}

// The positions of the largest scores, ascending; of equal ones the lower positions.
static std::vector<int64_t> largest(const Numbers& scores, int64_t topk) {
  std::vector<int64_t> positions;
  for (size_t i = 0; i < scores.size(); ++i) positions.push_back(static_cast<int64_t>(i));
  std::stable_sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  positions.resize(std::min<size_t>(positions.size(), static_cast<size_t>(topk)));
  std::sort(positions.begin(), positions.end());
  positions.resize(static_cast<size_t>(topk), -1);
  return positions;
}

struct IndexerSizes {
  Tokens tokens;
  std::vector<int64_t> seq_lens;
  int64_t heads, width, block_size, topk, num_distinct;
};

static void check_indexer(Type type, Type key_type, const IndexerSizes& sizes) {
  std::mt19937 random(32);
  const auto [tokens, seq_lens, heads, width, block_size, topk, num_distinct] = sizes;
  const int64_t sequences = static_cast<int64_t>(seq_lens.size()), total = tokens.before(sequences);
  const Numbers q_numbers = integers(total * heads * width, random), weight_numbers = integers(total * heads, random);
  const Array q = array_of(type, q_numbers), weights = array_of(Type::f32, weight_numbers);
  std::vector<Numbers> distinct;
  for (int64_t i = 0; i < num_distinct; ++i) distinct.push_back(integers(width, random));
  const PagedRows keys(key_type, width, width, block_size, seq_lens, random,
                       [&](int64_t, int64_t) { return distinct[random() % distinct.size()]; });
  Numbers expected;
  for (int64_t n = 0, token = 0; n < sequences; ++n)
    for (int64_t i = 0; i < tokens.counts[n]; ++i, ++token) {
      Numbers scores;
      for (int64_t s = 0; s <= seq_lens[n] - tokens.counts[n] + i; ++s) {
        double score = 0.0;
        for (int64_t head = 0; head < heads; ++head) {
          double dot = 0.0;
          for (int64_t c = 0; c < width; ++c) dot += q_numbers[(token * heads + head) * width + c] * keys.row(n, s)[c];
          score += weight_numbers[token * heads + head] * std::max(dot, 0.0);
        }
        scores.push_back(score);
      }
      for (int64_t position : largest(scores, topk)) expected.push_back(static_cast<double>(position));
    }
  check_laws("indexer_topk " + shown(type) + " " + shown(key_type) + " " + std::to_string(topk), sequences, 0.0,
             [&](const Kernels& kernels, int64_t first, int64_t count) {
               const int64_t before = tokens.before(first);
               const std::vector<int64_t> bounds = tokens.bounds(first, count);
               std::vector<int64_t> selected(static_cast<size_t>(bounds.back() * topk), -2);
               kernels.indexer_topk({q.at(before * heads * width),
                                     type,
                                     weights.as<float>() + before * heads,
                                     keys.pages(first),
                                     key_type,
                                     {bounds.data(), nullptr, count},
                                     heads,
                                     width,
                                     topk,
                                     selected.data()});
               return std::vector<Output>{output(selected)};
             },
             {expected});
}

TEST(indexer_topk) {
  const Tokens mixed{{1, 3, 11}};
  for (Type type : kActivations)
    for (Type key_type : {type, Type::i8, Type::f8, Type::mxfp4}) {
      check_indexer(type, key_type, {mixed, {96, 5, 131}, 3, 32, 4, 8, 60});
      check_indexer(type, key_type, {mixed, {49, 17, 64}, 19, 160, 16, 16, 3});    // ties
      check_indexer(type, key_type, {{{1, 2}}, {97, 192}, 32, 128, 64, 200, 90});  // fewer rows than wanted
      check_indexer(type, key_type, {{{1, 1}}, {1600, 769}, 2, 64, 16, 48, 700});  // several ranges of keys
      check_indexer(type, key_type, {{{1}}, {300}, 1, 32, 300, 1, 1});             // all tie
      if (key_type != Type::mxfp4) check_indexer(type, key_type, {mixed, {96, 5, 131}, 5, 48, 8, 7, 60});
    }
}
