// Products of every format and odd shape against a double loop; rows that do not know their
// neighbours; numbers that are none; tiles that give what vectors give.
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

// Rows in buffers of exactly the promised size.
struct ExactRows {
  std::vector<char> data;
  std::vector<float> scales, sums;
  std::vector<int32_t> offsets;
  Rows rows;

  ExactRows(const Weight& weight, const std::vector<float>& x, int num_rows) {
    rows = rows_for(weight, {});
    const size_t whole_rows = round_up(num_rows, ROW_STEP);
    data.resize(whole_rows * rows.stride);
    for (auto* numbers : {&scales, &sums}) numbers->resize(whole_rows * rows.groups);
    offsets.resize(whole_rows * rows.groups);
    rows.data = data.data(), rows.scales = scales.data();
    rows.offsets = offsets.data(), rows.sums = sums.data();
    for (int row = 0; row < num_rows; ++row)
      prepare_row(weight.format, &x[(size_t)row * weight.k], weight.k, rows, row);
  }
  ExactRows(const ExactRows&) = delete;
};

void buffers_hold_what_tiles_read() {
  Scratch scratch;
  Rows rows;
  scratch.fit([&] { rows = take_rows(scratch, 3, 34); });
  const auto size = [](const void* from, const void* to) {
    return (const char*)to - (const char*)from;
  };
  const int whole_rows = round_up(3, ROW_STEP);
  CHECK(size(rows.data, rows.scales) >= whole_rows * 34 * 4, "rows");
  CHECK(size(rows.scales, rows.offsets) >= whole_rows * 2 * 4, "scales");
  CHECK(size(rows.offsets, rows.sums) >= whole_rows * 2 * 4, "offsets");
}

// expected(row, panel): 32 sums; for every number of rows up to `most_rows`.
template <class Expected>
void equals_bit_for_bit(const Weight& weight, const std::vector<float>& x, int most_rows,
                        Expected expected) {
  for (int num_rows = 1; num_rows <= most_rows; ++num_rows) {
    const ExactRows exact(weight, x, num_rows);
    const auto take = [&](int row, int panel, f32x16 a, f32x16 b) {
      float found[PANEL];
      store(found, a), store(found + LANES, b);
      CHECK(row < num_rows, "row %d of %d", row, num_rows);
      CHECK(std::memcmp(found, expected(row, panel), sizeof found) == 0,
            "row %d of %d, panel %d, format %d", row, num_rows, panel, (int)weight.format);
    };
    matmul(weight, exact.rows, num_rows, 0, weight.panels(), take);
  }
}

// Among the rows are some of zeros, of NaN and of infinities.
void equals_vectors_alone(Format format, int n, int k, int most_rows, Random& random) {
  const Matrix matrix(format, n, k, random);
  const Weight& weight = matrix.weight;
  std::vector<float> x = random.normals((size_t)most_rows * k);
  for (int row = 0; row < most_rows; ++row) {
    if (row % 7 == 3) std::fill_n(x.begin() + (size_t)row * k, k, 0.0f);
    if (row % 13 == 5) x[(size_t)row * k + random.below(k)] = NOT_A_NUMBER;
    if (row % 17 == 8) x[(size_t)row * k + random.below(k)] = -ENDLESS;
  }
  const size_t panel_size = (size_t)most_rows * PANEL;
  std::vector<float> sums(panel_size * weight.panels());
  const ExactRows exact(weight, x, most_rows);
  for (int panel = 0; panel < weight.panels(); ++panel)
    vector_product(weight, panel, exact.rows, 0, most_rows, &sums[panel * panel_size]);
  equals_bit_for_bit(weight, x, most_rows,
                     [&](int row, int panel) { return &sums[panel * panel_size + row * PANEL]; });
}

#if TWOSTROKE_TILES
// In the order of a tile's product (csrc/tiles.h), whatever the number of rows.
void bfloat16_equals_tiles_alone(int n, int k, int most_rows, Random& random) {
  const Matrix matrix(Format::BFLOAT16, n, k, random);
  const Weight& weight = matrix.weight;
  const std::vector<float> x = random.normals((size_t)most_rows * k);
  std::vector<float> sums((size_t)most_rows * weight.panels() * PANEL);
  for (int row = 0; row < most_rows; ++row)
    for (int i = 0; i < n; ++i)
      for (int first = 0; first < k; first += 32) {
        float apart[2] = {};
        for (int j = first; j < std::min(first + 32, k); ++j)
          apart[j % 2] = std::fma(widen(narrow(x[(size_t)row * k + j])),
                                  (float)matrix.values[(size_t)i * k + j], apart[j % 2]);
        sums[(size_t)row * weight.panels() * PANEL + i] += apart[0] + apart[1];
      }
  equals_bit_for_bit(weight, x, most_rows, [&](int row, int panel) {
    return &sums[((size_t)row * weight.panels() + panel) * PANEL];
  });
}
#endif

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
  CHECK(ts_prepare() == 0, "these kernels cannot be used here");
  buffers_hold_what_tiles_read();
  Random random(1);
  for (Format format : {Format::FLOAT32, Format::BFLOAT16, Format::INT8, Format::INT4}) {
    const std::vector<int> widths =
        is_grouped(format) ? std::vector{32, 96} : std::vector{2, 6, 34, 64, 100};
    for (int k : widths)
      for (int n : {1, 31, 32, 33, 100})
        for (int num_rows : {0, 1, 2, 5, 6, 7, 13, 40, 70})
          equals_double_loop(format, n, k, num_rows, random);
    const Matrix matrix(format, 45, 64, random);
    const std::vector<float> x = random.normals(50 * 64);
    rows_are_independent(matrix, x, 50);
    std::vector<bf16> narrowed;
    for (float number : x) narrowed.push_back(narrow(number));
    rows_are_independent(matrix, narrowed, 50);
    rows_are_independent(matrix, std::vector<float>(20 * 64), 20);  // groups of zeros
    bad_numbers_stay_in_their_row(format, random);
  }
  for (Format format : {Format::INT8, Format::INT4}) {
    equals_vectors_alone(format, 33, 32, 70, random);
    equals_vectors_alone(format, 64, 96, 70, random);
    equals_vectors_alone(format, 5, 34 * GROUP, 70, random);  // three chunks
  }
#if TWOSTROKE_TILES
  for (int k : {2, 32, 94, 128}) bfloat16_equals_tiles_alone(45, k, 70, random);
#endif
}
