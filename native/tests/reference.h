// What kernels are compared with: the same computed plainly, in double precision, rounded only where the contract says.
#pragma once

#include "check.h"

namespace perilune::tests {

using Numbers = std::vector<double>;

// The number that an element stands for; codes of mxfp4 without their scale.
double number_of(Type type, const void* data, int64_t element);
Numbers numbers_of(Type type, const void* data, int64_t count);
inline Numbers numbers_of(const Array& array) {
  return numbers_of(array.type(), array.data(), array.bytes() / type_bytes(array.type(), 1));
}
double weight_at(const Matrix& matrix, int64_t row, int64_t column);
// The code of the nearest number of i8, f8 or mxfp4, halves to even, of mxfp4 towards zero.
uint8_t to_code(Type type, double x);
// `x` to the nearest number of f32 or bf16.
double rounded_to(Type type, double x);

double sigmoid(double x);
inline double silu(double x) { return x * sigmoid(x); }

// Probabilities of scores, in place.
void softmax(Numbers& scores);

// ---- packed rows, see ops/packed_rows -------------------------------------------------------------------------------

int64_t packed_bytes(Type type, int64_t scaled, int64_t columns);
std::vector<uint8_t> pack_row(const Numbers& row, int64_t scaled, Type type);
Numbers unpack_row(const void* bytes, int64_t scaled, int64_t columns, Type type);

// ---- paged rows
// ---------------------------------------------------------------------------------------------------------

// Rows of sequences in blocks that lie in any order, the last row of the last block at the end of the pool. Rows that
// belong to no sequence hold NaN.
class PagedRows {
 public:
  // Sequence n has seq_lens[n] rows. They hold numbers of `type`, or are packed with `scaled` columns quantised.
  // `draw(sequence, position)` gives a row's `columns` numbers.
  PagedRows(Type type, int64_t scaled, int64_t columns, int64_t block_size, std::vector<int64_t> seq_lens,
            std::mt19937& random, const std::function<Numbers(int64_t, int64_t)>& draw);
  Pages pages(int64_t first_sequence) const;
  // A row as a kernel reads it.
  const Numbers& row(int64_t sequence, int64_t position) const { return rows_[sequence][position]; }
  int64_t seq_len(int64_t sequence) const { return seq_lens_[sequence]; }

 private:
  int64_t block_size_, row_bytes_, table_width_;
  std::vector<int64_t> seq_lens_, table_;
  std::vector<std::vector<Numbers>> rows_;
  Array pool_;
};

// `counts[n]` tokens of each sequence, numbered in one row; and those of a run of sequences, numbered from zero.
struct Tokens {
  std::vector<int64_t> counts;

  int64_t before(int64_t sequence) const;
  std::vector<int64_t> bounds(int64_t first, int64_t count) const;
};

}  // namespace perilune::tests
