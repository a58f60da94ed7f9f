// How the cache's element types are held in words of 4 bytes, and what they are multiplied with.
//
//   float32   one number a word; queries and weights are float32
//   bfloat16  two; queries and weights are rounded to bfloat16
//   int8      four codes of -127 to 127; the rows' float32 scales stand behind a tile's codes. Both
//             are the very numbers of cpu_kernels/kv_dtype.py. Queries are rounded to 16 bits
//             over their head, weights (times the values' scales) to 16 bits over their partition,
//             and held as two planes of bytes, high and low, since the CPU multiplies bytes. All
//             sums of products are exact integers of 32 bits, rounded once at the end.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "vector.h"

namespace twostroke {

constexpr int TILE = 16;  // positions
constexpr int PARTITION_TILES = 8;
constexpr int PARTITION = TILE * PARTITION_TILES;
constexpr int MAX_HEAD_DIM = 512;

enum class KVType : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// work(element), whose type is what the cache holds.
template <class Work>
inline void with_element(KVType type, Work work) {
  switch (type) {
    case KVType::FLOAT32: return work(float{});
    case KVType::BFLOAT16: return work(bf16{});
    case KVType::INT8: return work(int8_t{});
  }
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

// The lowest byte of each lane.
inline void store_bytes(void* to, i32x16 x) {
  const i8x16 bytes = __builtin_convertvector(x, i8x16);
  std::memcpy(to, &bytes, sizeof bytes);
}

inline void store(int8_t* to, f32x16 x) { store_bytes(to, to_int(x)); }

// Every fourth byte. Touches no others, as vector.h has it for wider numbers.
template <int STEP>
inline void store_apart(int8_t* to, f32x16 x) {
  static_assert(STEP == 4);
#if TWOSTROKE_AVX512
  _mm512_mask_storeu_epi8(to, 0x1111111111111111, (__m512i)to_int(x));
#else
  const i32x16 codes = to_int(x);
  for (int i = 0; i < LANES; ++i) to[i * STEP] = (int8_t)codes[i];
#endif
}

// The largest magnitude of some numbers; NaN where one of them is. Bits are compared as integers:
// in that order a NaN is above all numbers.
class Peak {
 public:
  void add(f32x16 x) {
    const i32x16 bits = (i32x16)abs(x);
    bits_ = bits > bits_ ? bits : bits_;
  }
  float value() const {
#if TWOSTROKE_AVX512
    return std::bit_cast<float>(_mm512_reduce_max_epi32((__m512i)bits_));
#else
    int32_t most = 0;
    for (int i = 0; i < LANES; ++i) most = std::max(most, bits_[i]);
    return std::bit_cast<float>(most);
#endif
  }

 private:
  i32x16 bits_ = {};
};

// To integers: `peak` becomes `largest`. Below 2**-100, which is 0 beside anything that matters,
// the inverse would be beyond float32.
struct Rounding {
  float size;     // what 1 is worth; NaN where `peak` is not finite
  float inverse;

  Rounding(float peak, float largest) {
    const float above_zero = peak < 0x1p-100f ? 0x1p-100f : peak;
    size = std::isfinite(peak) ? above_zero / largest : NAN;
    inverse = largest / above_zero;
  }
};

// float and bf16.
template <class Element>
struct Words {
  using Sum = f32x16;
  static constexpr int WIDTH = 4 / sizeof(Element);
  static constexpr int PLANES = 1;
  static constexpr bool IS_SCALED = false;

  static size_t query_bytes(int dim) { return dim * sizeof(Element); }

  // A head's query times `factor`.
  template <class Number>
  static void put_query(const Number* x, float factor, int dim, char* out) {
    for (int d = 0; d < dim; d += LANES)
      store((Element*)out + d, load(x + d) * set1(factor));
  }

  static i32x16 key(i32x16 tile) { return tile; }
  static f32x16 dot_key(f32x16 sum, i32x16 key, i32x16 query) { return dot(sum, key, query); }
  static f32x16 dot_value(f32x16 sum, i32x16 value, i32x16 weight) {
    return dot(sum, value, weight);
  }

 private:
  static f32x16 dot(f32x16 sum, i32x16 tile, i32x16 word) {
    if constexpr (WIDTH == 1)
      return fma((f32x16)tile, (f32x16)word, sum);
    else
      return dot_bf16(sum, tile, word);
  }
};

template <>
struct Words<int8_t> {
  using Sum = i32x16;
  static constexpr int WIDTH = 4;
  static constexpr int PLANES = 2;
  static constexpr bool IS_SCALED = true;

  // Behind a query's planes.
  struct QueryScale {
    float size;
    uint32_t shift;  // 128 * sum of the query: takes back the 128 that key() adds
  };

  static size_t query_bytes(int dim) { return (size_t)PLANES * dim + sizeof(QueryScale); }

  // Codes are x / scale, rounded to even.
  template <class Number>
  static float row_scale(const Number* x, int dim) {
    Peak peak;
    for (int d = 0; d < dim; d += LANES) peak.add(load(x + d));
    const float scale = peak.value() / 127.0f;
    return scale < FLT_MIN ? FLT_MIN : scale;
  }

  // Both planes signed, so that |x| is at most 256 * 127 + 127 = 32639. A score's integer is then
  // at most 512 * 128 * 32639 < 2**31.
  template <class Number>
  static void put_query(const Number* x, float factor, int dim, char* out) {
    Peak peak;
    for (int d = 0; d < dim; d += LANES) peak.add(load(x + d) * set1(factor));
    const Rounding rounding(peak.value(), 32639.0f);
    u32x16 totals = {};
    for (int d = 0; d < dim; d += LANES) {
      const i32x16 codes = to_int(load(x + d) * set1(factor) * set1(rounding.inverse));
      store_bytes(out + d, (codes + set1(128)) >> 8);
      store_bytes(out + dim + d, codes);
      totals += (u32x16)codes;
    }
    QueryScale scale{rounding.size, 0};
    for (int i = 0; i < LANES; ++i) scale.shift += totals[i] * 128;
    std::memcpy(out + (size_t)PLANES * dim, &scale, sizeof scale);
  }

  // The CPU multiplies unsigned by signed bytes: codes + 128 are the unsigned ones beside a query's
  // planes, the codes are the signed ones beside a weight's.
  static i32x16 key(i32x16 tile) { return tile ^ set1((int32_t)0x80808080); }
  static i32x16 dot_key(i32x16 sum, i32x16 key, i32x16 query) { return dot_u8_s8(sum, key, query); }
  static i32x16 dot_value(i32x16 sum, i32x16 value, i32x16 weight) {
    return dot_u8_s8(sum, weight, value);
  }

  static f32x16 score(i32x16 high, i32x16 low, const char* query, int dim, f32x16 key_scales) {
    QueryScale scale;
    std::memcpy(&scale, query + (size_t)PLANES * dim, sizeof scale);
    const u32x16 exact = ((u32x16)high << 8) + (u32x16)low - scale.shift;  // wraps, but ends right
    return to_float((i32x16)exact) * (key_scales * set1(scale.size));
  }

  // Of one partition's weights, none below 0, and their peak: planes of PARTITION bytes, both
  // unsigned. Returns what 1 is worth.
  static float put_weights(const float* weights, float peak, int num_tiles, char* out) {
    const Rounding rounding(peak, 65535.0f);
    for (int i = 0; i < num_tiles * TILE; i += TILE) {
      const i32x16 codes = to_int(load(weights + i) * set1(rounding.inverse));
      store_bytes(out + i, codes >> 8);
      store_bytes(out + PARTITION + i, codes);
    }
    return rounding.size;
  }

  static f32x16 weighed(i32x16 high, i32x16 low, float size) {
    return to_float((high << 8) + low) * set1(size);  // at most 128 * 128 * 65535 < 2**31
  }
};

}  // namespace twostroke
