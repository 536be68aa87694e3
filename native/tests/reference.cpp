#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "simd/element.h"

namespace perilune::tests {
namespace {

constexpr double kPairs[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

double of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// The code below `end` whose number is nearest to a magnitude; of two as near the one that `wins(code)`.
template <typename Number, typename Wins>
uint8_t nearest(double magnitude, int end, const Number& number, const Wins& wins) {
  int best = 0;
  for (int code = 1; code < end; ++code) {
    const double gain = std::fabs(number(best) - magnitude) - std::fabs(number(code) - magnitude);
    if (gain > 0 || (gain == 0 && wins(code))) best = code;
  }
  return static_cast<uint8_t>(best);
}

// The exponent of the smallest power of two under which `largest` keeps within what a type can hold.
int scale_exponent(Type type, double largest) {
  if (type == Type::mxfp4) {
    if (largest == 0.0) return -3;
    int exponent = -127;
    while (exponent < 127 && largest >= std::ldexp(7.0, exponent)) ++exponent;  // up to 7 the nearest is 6
    return exponent;
  }
  const double reach = std::max(largest, 1e-30) / (type == Type::i8 ? 127.0 : 448.0);
  int exponent = -126;
  while (std::ldexp(1.0, exponent) < reach) ++exponent;
  return exponent;
}

int64_t group_of(Type type) { return type == Type::mxfp4 ? 32 : 128; }

}  // namespace

uint8_t to_code(Type type, double x) {
  if (type == Type::i8) return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x)));
  const uint8_t sign = x < 0 || (type == Type::f8 && std::signbit(x)) ? 1 : 0;
  if (type == Type::f8)
    return nearest(
               std::fabs(x), 0x7f, [](int code) { return of_e4m3(static_cast<uint8_t>(code)); },
               [](int code) { return code % 2 == 0; }) |
           static_cast<uint8_t>(sign << 7);
  return nearest(
             std::fabs(x), 8, [](int code) { return kPairs[code]; }, [](int) { return false; }) |
         static_cast<uint8_t>(sign << 3);
}

double number_of(Type type, const void* data, int64_t element) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  switch (type) {
    case Type::f32: {
      float x;
      std::memcpy(&x, bytes + 4 * element, 4);
      return x;
    }
    case Type::bf16: {
      bf16 x;
      std::memcpy(&x, bytes + 2 * element, 2);
      return widen(x);
    }
    case Type::i8:
      return static_cast<int8_t>(bytes[element]);
    case Type::f8:
      return of_e4m3(bytes[element]);
    default: {
      const int code = bytes[element / 2] >> (element % 2 * 4) & 15;
      return code & 8 ? -kPairs[code & 7] : kPairs[code];
    }
  }
}

Numbers numbers_of(Type type, const void* data, int64_t count) {
  Numbers numbers;
  for (int64_t i = 0; i < count; ++i) numbers.push_back(number_of(type, data, i));
  return numbers;
}

double weight_at(const Matrix& matrix, int64_t row, int64_t column) {
  const double value = number_of(matrix.type, matrix.data, row * matrix.columns + column);
  if (matrix.type == Type::f32 || matrix.type == Type::bf16) return value;
  if (matrix.type != Type::mxfp4) return value * number_of(Type::f32, matrix.scales, row);
  const int exponent = static_cast<const uint8_t*>(matrix.scales)[row * (matrix.columns / 32) + column / 32];
  return std::ldexp(value, exponent - 127);
}

double rounded_to(Type type, double x) {
  return type == Type::bf16 ? widen(to_bf16(static_cast<float>(x))) : static_cast<float>(x);
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void softmax(Numbers& scores) {
  const double peak = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  for (double& score : scores) total += score = std::exp(score - peak);
  for (double& score : scores) score /= total;
}

int64_t packed_bytes(Type type, int64_t scaled, int64_t columns) {
  const int64_t groups = (scaled + group_of(type) - 1) / group_of(type);
  return type_bytes(type, scaled) + (type == Type::mxfp4 ? groups : 4 * groups) + 2 * (columns - scaled);
}

std::vector<uint8_t> pack_row(const Numbers& row, int64_t scaled, Type type) {
  const int64_t columns = static_cast<int64_t>(row.size()), group = group_of(type);
  std::vector<uint8_t> bytes(static_cast<size_t>(packed_bytes(type, scaled, columns)), 0);
  uint8_t* scales = bytes.data() + type_bytes(type, scaled);
  for (int64_t first = 0; first < scaled; first += group) {
    const auto begin = row.begin() + first, end = row.begin() + std::min(first + group, scaled);
    const bool is_finite = std::all_of(begin, end, [](double x) { return std::isfinite(x); });
    double largest = 0.0;
    for (auto x = begin; x != end; ++x) largest = std::max(largest, std::fabs(*x));
    const int exponent = is_finite ? scale_exponent(type, largest) : 0;
    for (auto x = begin; x != end; ++x) {
      const int64_t i = x - row.begin();
      const uint8_t code = is_finite ? to_code(type, std::ldexp(*x, -exponent)) : 0;
      bytes[static_cast<size_t>(type == Type::mxfp4 ? i / 2 : i)] |=
          static_cast<uint8_t>(type == Type::mxfp4 && i % 2 == 1 ? code << 4 : code);
    }
    if (type == Type::mxfp4) {
      *scales++ = static_cast<uint8_t>(is_finite ? exponent + 127 : 255);
    } else {
      const float scale = is_finite ? std::ldexp(1.0f, exponent) : NAN;
      std::memcpy(scales, &scale, 4);
      scales += 4;
    }
  }
  for (int64_t i = scaled; i < columns; ++i, scales += 2) {
    const bf16 further = to_bf16(static_cast<float>(row[static_cast<size_t>(i)]));
    std::memcpy(scales, &further, 2);
  }
  return bytes;
}

Numbers unpack_row(const void* bytes, int64_t scaled, int64_t columns, Type type) {
  const int64_t group = group_of(type), groups = (scaled + group - 1) / group;
  const auto* scales = static_cast<const uint8_t*>(bytes) + type_bytes(type, scaled);
  Numbers row = numbers_of(type, bytes, scaled);
  for (int64_t i = 0; i < scaled; ++i)
    row[static_cast<size_t>(i)] *=
        type == Type::mxfp4 ? std::ldexp(1.0, scales[i / group] - 127) : number_of(Type::f32, scales, i / group);
  const Numbers further = numbers_of(Type::bf16, scales + 4 * groups, columns - scaled);
  row.insert(row.end(), further.begin(), further.end());
  return row;
}

// What a pool is aligned for: the widest numbers that kernels read in place.
static Type alignment_of(Type type) { return type == Type::f32 || type == Type::mxfp4 ? type : Type::bf16; }

static int64_t num_blocks(const std::vector<int64_t>& seq_lens, int64_t block_size) {
  int64_t blocks = 0;
  for (int64_t length : seq_lens) blocks += (length + block_size - 1) / block_size;
  return blocks;
}

PagedRows::PagedRows(Type type, int64_t scaled, int64_t columns, int64_t block_size, std::vector<int64_t> seq_lens,
                     std::mt19937& random, const std::function<Numbers(int64_t, int64_t)>& draw)
    : block_size_(block_size),
      row_bytes_(type == Type::f32 || type == Type::bf16 ? type_bytes(type, columns)
                                                         : packed_bytes(type, scaled, columns)),
      seq_lens_(std::move(seq_lens)),
      pool_(alignment_of(type),
            num_blocks(seq_lens_, block_size) * block_size * row_bytes_ * 2 / type_bytes(alignment_of(type), 2)) {
  std::vector<int64_t> blocks(static_cast<size_t>(num_blocks(seq_lens_, block_size)));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  const int64_t longest = *std::max_element(seq_lens_.begin(), seq_lens_.end());
  table_width_ = (longest + block_size - 1) / block_size;
  table_.assign(seq_lens_.size() * static_cast<size_t>(table_width_), -1);
  size_t taken = 0;
  for (size_t n = 0; n < seq_lens_.size(); ++n) {
    for (int64_t i = 0; i * block_size < seq_lens_[n]; ++i)
      table_[n * static_cast<size_t>(table_width_) + static_cast<size_t>(i)] = blocks[taken++];
    rows_.emplace_back();
    for (int64_t position = 0; position < seq_lens_[n]; ++position) {
      const Numbers numbers = draw(static_cast<int64_t>(n), position);
      const int64_t block = table_[n * static_cast<size_t>(table_width_) + static_cast<size_t>(position / block_size)];
      char* to = pool_.as<char>() + (block * block_size + position % block_size) * row_bytes_;
      if (type == Type::f32 || type == Type::bf16) {
        for (int64_t c = 0; c < columns; ++c) {
          const float x = static_cast<float>(numbers[static_cast<size_t>(c)]);
          const bf16 narrow = to_bf16(x);
          std::memcpy(to + type_bytes(type, c), type == Type::f32 ? static_cast<const void*>(&x) : &narrow,
                      type_bytes(type, 1));
        }
        rows_.back().push_back(numbers_of(type, to, columns));
      } else {
        const std::vector<uint8_t> packed = pack_row(numbers, scaled, type);
        std::memcpy(to, packed.data(), packed.size());
        rows_.back().push_back(unpack_row(to, scaled, columns, type));
      }
    }
  }
}

Pages PagedRows::pages(int64_t first_sequence) const {
  return {pool_.data(), row_bytes_,
          block_size_,  table_.data() + first_sequence * table_width_,
          table_width_, seq_lens_.data() + first_sequence};
}

int64_t Tokens::before(int64_t sequence) const {
  return std::accumulate(counts.begin(), counts.begin() + sequence, int64_t{0});
}

std::vector<int64_t> Tokens::bounds(int64_t first, int64_t count) const {
  std::vector<int64_t> bounds = {0};
  for (int64_t n = first; n < first + count; ++n) bounds.push_back(bounds.back() + counts[static_cast<size_t>(n)]);
  return bounds;
}

}  // namespace perilune::tests
