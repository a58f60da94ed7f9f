// Each operation of vector.h against plain arithmetic, lane by lane.
#include "../vector.h"

#include <limits>
#include <random>

#include "check.h"

using namespace twostroke;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

std::mt19937 numbers(1);

float uniform(float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(numbers);
}

f32x16 uniform_lanes(float low, float high) {
  f32x16 x;
  for (int i = 0; i < LANES; ++i) x[i] = uniform(low, high);
  return x;
}

void test_exp() {
  for (int round = 0; round < 2000; ++round) {
    const f32x16 x = uniform_lanes(-87, 88), y = exp(x);
    for (int i = 0; i < LANES; ++i) expect_near("exp", x[i], y[i], std::exp((double)x[i]), 2.4e-7);
  }
  for (float x : {-INF, -100.0f, 0.0f, NOT_A_NUMBER})
    expect_equal("exp", x, exp(set1(x))[5], std::exp(x) < 1e-30 ? 0 : std::exp(x));
}

void test_round() {
  for (float x : {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.49999997f, 127.5f, -126.5f, 0.0f})
    expect_equal("round", x, round(set1(x))[3], std::nearbyint(x));
}

void test_arithmetic() {
  const f32x16 a = uniform_lanes(-4, 4), b = uniform_lanes(-4, 4), c = uniform_lanes(-4, 4);
  double total = 0;
  for (int i = 0; i < LANES; ++i) {
    total += a[i];
    expect_near("fma", a[i], fma(a, b, c)[i], (double)a[i] * b[i] + c[i], 1e-4);
    expect_equal("max", a[i], max(a, b)[i], std::fmax(a[i], b[i]));
    expect_equal("abs", a[i], abs(a)[i], std::fabs(a[i]));
  }
  expect_near("sum", a[0], sum(a), total, 1e-5);
  float biggest = a[0];
  for (int i = 1; i < LANES; ++i) biggest = std::fmax(biggest, a[i]);
  expect_equal("largest", a[0], largest(a), biggest);
}

// Every 16-bit pattern, widened one by one and by sixteen.
void test_narrow_types() {
  for (int first = 0; first < 1 << 16; first += LANES) {
    uint16_t bits[LANES], back[LANES];
    for (int i = 0; i < LANES; ++i) bits[i] = first + i;
    const f32x16 wide = load(bits), wide_half = load_half(bits);
    store(back, wide);
    for (int i = 0; i < LANES; ++i) {
      expect_equal("widen", bits[i], wide[i], widen(bits[i]));
      expect_equal("widen_half", bits[i], wide_half[i], widen_half(bits[i]));
      const bool subnormal = (bits[i] & 0x7f80) == 0;  // AVX-512 takes those for zeros
      if (std::isfinite(wide[i]) && !subnormal) expect_equal("store", bits[i], back[i], bits[i]);
    }
  }
  expect_equal("half", 0x3c00, widen_half(0x3c00), 1.0);
  expect_equal("half", 0xc000, widen_half(0xc000), -2.0);
  expect_equal("half", 1, widen_half(1), 0x1p-24);
  expect_equal("half", 0x7bff, widen_half(0x7bff), 65504.0);
  expect_equal("half", 0xfc00, widen_half(0xfc00), -INF);
}

void test_narrowing_rounds_alike() {
  for (int round = 0; round < 2000; ++round) {
    const f32x16 x = uniform_lanes(-100, 100);
    bf16 narrowed[LANES];
    store(narrowed, x);
    for (int i = 0; i < LANES; ++i) expect_equal("narrow", x[i], narrowed[i], narrow(x[i]));
  }
  bf16 lanes[LANES];
  store(lanes, set1(NOT_A_NUMBER));
  expect_equal("narrow", NOT_A_NUMBER, widen(lanes[0]), NOT_A_NUMBER);
  expect_equal("narrow", NOT_A_NUMBER, widen(narrow(NOT_A_NUMBER)), NOT_A_NUMBER);
}

void test_dot_u8_s8() {
  for (int round = 0; round < 200; ++round) {
    uint8_t a[64];
    int8_t b[64];
    for (int i = 0; i < 64; ++i) a[i] = numbers() & 255, b[i] = (int)(numbers() & 255) - 128;
    if (round == 0)
      for (int i = 0; i < 64; ++i) a[i] = 255, b[i] = -128;  // the largest sum must not saturate
    const i32x16 found = dot_u8_s8(set1(1000), load_bits(a), load_bits(b));
    for (int i = 0; i < LANES; ++i) {
      int wanted = 1000;
      for (int j = 4 * i; j < 4 * i + 4; ++j) wanted += a[j] * b[j];
      expect_equal("dot_u8_s8", i, found[i], wanted);
    }
  }
}

void test_dot_bf16() {
  bf16 a[32], b[32];
  for (int i = 0; i < 32; ++i) a[i] = narrow(uniform(1, 2)), b[i] = narrow(uniform(1, 2));
  const f32x16 found = dot_bf16(set1(3.0f), load_bits(a), load_bits(b));
  for (int i = 0; i < LANES; ++i) {
    const double even = (double)widen(a[2 * i]) * widen(b[2 * i]);
    const double odd = (double)widen(a[2 * i + 1]) * widen(b[2 * i + 1]);
    expect_near("dot_bf16", i, found[i], 3 + even + odd, 3e-7);
  }
}

int main() {
  test_exp();
  test_round();
  test_arithmetic();
  test_narrow_types();
  test_narrowing_rounds_alike();
  test_dot_u8_s8();
  test_dot_bf16();
}
