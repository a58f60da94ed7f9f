// What the kernels' own tests share: numbers at random, packed weights whose values are known, and
// checks that end the program. Buffers are exactly as large as the kernels are promised, so that
// AddressSanitizer sees the first byte beyond.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../matmul.h"

namespace twostroke {

#define CHECK(condition, ...)                                  \
  do {                                                         \
    if (!(condition)) {                                        \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                \
      std::printf("\n");                                       \
      std::exit(1);                                            \
    }                                                          \
  } while (false)

// NaN equals NaN.
inline void expect_near(const char* what, double input, double found, double wanted,
                        double relative) {
  const bool same = std::isnan(wanted) ? std::isnan(found)
                                       : found == wanted ||
                                             std::abs(found - wanted) <= relative * std::abs(wanted);
  CHECK(same, "%s(%.9g) is %.9g, should be %.9g", what, input, found, wanted);
}

inline void expect_equal(const char* what, double input, double found, double wanted) {
  expect_near(what, input, found, wanted, 0);
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int end) { return (int)(engine_() % (unsigned)end); }
  float normal(float size = 1) { return size * normal_(engine_); }
  std::vector<float> normals(size_t count, float size = 1) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = normal(size);
    return numbers;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline double value_of_half(half x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25)
                                    : std::ldexp(fraction, -24);
  return x & 0x8000 ? -magnitude : magnitude;
}

// A packed weight with random numbers, and what they are: values [n][k].
struct Matrix {
  std::vector<char> words;
  std::vector<half> scales, minimums;
  std::vector<double> values;
  Weight weight;

  Matrix(Format format, int n, int k, Random& random) {
    weight = {format, n, k, nullptr, nullptr, nullptr};
    const int panels = weight.panels();
    words.resize(weight.panel_bytes() * panels);
    values.resize((size_t)n * k);
    if (is_grouped(format)) scales.resize((size_t)panels * weight.groups() * PANEL);
    if (format == Format::INT4) minimums.resize(scales.size());
    weight.words = words.data(), weight.scales = scales.data(), weight.minimums = minimums.data();
    for (int row = 0; row < n; ++row) {
      for (int group = 0; is_grouped(format) && group < weight.groups(); ++group)
        fill(row, group, random);
      for (int i = 0; i < k; ++i) values[(size_t)row * k + i] = put_value(row, i, random);
    }
  }
  Matrix(const Matrix&) = delete;  // `weight` points into it

 private:
  size_t group_at(int row, int group) const {
    return ((size_t)(row / PANEL) * weight.groups() + group) * PANEL + row % PANEL;
  }
  void fill(int row, int group, Random& random) {  // 0.002 to 0.06, subnormals too
    const half normal = (half)(0x1800 + random.below(0x1400));
    scales[group_at(row, group)] = random.below(8) ? normal : (half)random.below(99);
    if (!minimums.empty()) minimums[group_at(row, group)] = 0xa800 + random.below(0x1400);
  }
  double put_value(int row, int i, Random& random) {
    const auto place = [&](int word, int byte) {
      const size_t row_words = weight.panel_bytes() / PANEL / 4;
      return &words[((row / PANEL * row_words + word) * PANEL + row % PANEL) * 4 + byte];
    };
    switch (weight.format) {
      case Format::FLOAT32: {
        const float value = random.normal(0.1f);
        std::memcpy(place(i, 0), &value, 4);
        return value;
      }
      case Format::BFLOAT16: {
        const bf16 value = narrow(random.normal(0.1f));
        std::memcpy(place(i / 2, i % 2 * 2), &value, 2);
        return widen(value);
      }
      case Format::INT8: {
        const int code = random.below(255) - 127;
        *place(i / 4, i % 4) = (char)(code + 128);
        return code * value_of_half(scales[group_at(row, i / GROUP)]);
      }
      default: {
        const int code = random.below(16), within = i % (GROUP / 2);
        char* byte = place(i / GROUP * 4 + within / 4, within % 4);
        *byte = (char)(*byte | (i % GROUP < GROUP / 2 ? code : code << 4));
        return code * value_of_half(scales[group_at(row, i / GROUP)]) +
               value_of_half(minimums[group_at(row, i / GROUP)]);
      }
    }
  }
};

}  // namespace twostroke
