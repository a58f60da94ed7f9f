// Products of every format and odd shape against a double loop; rows that do not know their
// neighbours; numbers that are none.
#include <limits>

#include "../kernels.cpp"
#include "check.h"

namespace {

const float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
const float ENDLESS = std::numeric_limits<float>::infinity();

// What a row becomes before it is multiplied (csrc/matmul.h).
std::vector<double> prepared(Format format, const float* x, int k) {
  std::vector<double> out(x, x + k);
  if (format == Format::BFLOAT16)
    for (double& number : out) number = widen(narrow((float)number));
  for (int first = 0; is_grouped(format) && first < k; first += GROUP) {
    float peak = 0;
    for (int i = first; i < first + GROUP; ++i) peak = std::fmax(peak, std::fabs(x[i]));
    for (int i = first; i < first + GROUP; ++i)
      out[i] = peak > 1e-30f ? std::nearbyint(x[i] * (127.0f / peak)) * (double)(peak / 127.0f) : 0;
  }
  return out;
}

template <class Number>
std::vector<Number> product(const Matrix& matrix, const std::vector<Number>& x, int num_rows,
                            const float* bias, int num_threads) {
  std::vector<Number> out((size_t)num_rows * matrix.weight.n);
  const int failed = ts_matmul(&matrix.weight, x.data(), num_rows, sizeof(Number) == 2, bias,
                               out.data(), num_threads);
  CHECK(failed == 0, "no product");
  return out;
}

void equals_double_loop(Format format, int n, int k, int num_rows, Random& random) {
  const Matrix matrix(format, n, k, random);
  const std::vector<float> x = random.normals((size_t)num_rows * k), bias = random.normals(n);
  const std::vector<float> out = product(matrix, x, num_rows, bias.data(), 2);
  for (int row = 0; row < num_rows; ++row) {
    const std::vector<double> inputs = prepared(format, &x[(size_t)row * k], k);
    for (int i = 0; i < n; ++i) {
      double expected = bias[i], size = std::fabs(bias[i]);
      for (int j = 0; j < k; ++j) {
        const double term = inputs[j] * matrix.values[(size_t)i * k + j];
        expected += term, size += std::fabs(term);
      }
      const double error = std::fabs(out[(size_t)row * n + i] - expected);
      CHECK(error <= 1e-6 * size, "format %d, %d rows of %d to %d: error %g of %g", (int)format,
            num_rows, k, n, error, size);
    }
  }
}

template <class Number>
void rows_are_independent(const Matrix& matrix, const std::vector<Number>& x, int num_rows) {
  const int n = matrix.weight.n, k = matrix.weight.k;
  const std::vector<Number> together = product(matrix, x, num_rows, nullptr, 1);
  for (int threads = 2; threads <= 3; ++threads)
    CHECK(same_bits(together, product(matrix, x, num_rows, nullptr, threads)), "%d threads",
          threads);
  for (int row = 0; row < num_rows; ++row) {
    const std::vector<Number> one(x.begin() + row * k, x.begin() + (row + 1) * k);
    const auto begin = together.begin() + row * n;
    const std::vector<Number> expected(begin, begin + n);
    CHECK(same_bits(expected, product(matrix, one, 1, nullptr, 1)), "row %d of %d, format %d", row,
          num_rows, (int)matrix.weight.format);
  }
}

void bad_numbers_stay_in_their_row(Format format, Random& random) {
  const int n = 40, k = 64, num_rows = 8;
  const Matrix matrix(format, n, k, random);
  std::vector<float> x = random.normals(num_rows * k);
  const std::vector<float> clean = product(matrix, x, num_rows, nullptr, 1);
  x[1 * k + 5] = NOT_A_NUMBER;
  x[3 * k + 40] = ENDLESS;
  x[4 * k + 63] = -ENDLESS;
  x[4 * k + 1] = ENDLESS;
  const std::vector<float> spoiled = product(matrix, x, num_rows, nullptr, 1);
  for (int row = 0; row < num_rows; ++row)
    for (int i = row * n; i < (row + 1) * n; ++i)
      if (row == 1 || row == 3 || row == 4)
        CHECK(!std::isfinite(spoiled[i]), "row %d, format %d", row, (int)format);
      else
        CHECK(spoiled[i] == clean[i], "row %d, format %d", row, (int)format);
}

}  // namespace

int main() {
  Random random(1);
  for (Format format : {Format::FLOAT32, Format::BFLOAT16, Format::INT8, Format::INT4}) {
    const std::vector<int> widths =
        is_grouped(format) ? std::vector{32, 96} : std::vector{2, 6, 34, 100};
    for (int k : widths)
      for (int n : {1, 31, 32, 33, 100})
        for (int num_rows : {0, 1, 2, 5, 6, 7, 13, 40})
          equals_double_loop(format, n, k, num_rows, random);
    const Matrix matrix(format, 45, 64, random);
    const std::vector<float> x = random.normals(20 * 64);
    rows_are_independent(matrix, x, 20);
    std::vector<bf16> narrowed;
    for (float number : x) narrowed.push_back(narrow(number));
    rows_are_independent(matrix, narrowed, 20);
    rows_are_independent(matrix, std::vector<float>(20 * 64), 20);  // groups of zeros
    bad_numbers_stay_in_their_row(format, random);
  }
}
