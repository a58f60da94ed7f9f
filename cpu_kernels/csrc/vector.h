// Vectors of 16 lanes, the only vocabulary of the kernels: AVX-512 where the compiler may use it,
// else the compiler's own vector types, which every CPU has.
//
// The operators + - * / < of the vector types are the compiler's. What they lack is here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && \
    defined(__AVX512BF16__)
#define TWOSTROKE_AVX512 1
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace twostroke {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

using bf16 = uint16_t;  // the upper half of a float32
using half = uint16_t;  // IEEE binary16

template <class Vector>
inline Vector load_as(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);  // one unaligned load
  return vector;
}

inline f32x16 load(const float* from) { return load_as<f32x16>(from); }
inline i32x16 load_bits(const void* from) { return load_as<i32x16>(from); }
inline void store(float* to, f32x16 x) { std::memcpy(to, &x, sizeof x); }

inline f32x16 set1(float x) { return x - f32x16{}; }
inline i32x16 set1(int32_t x) { return x + i32x16{}; }

// 4 bytes (4 codes, 2 bfloat16, 1 float32) in every lane.
inline i32x16 broadcast_bits(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return set1(bits);
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if TWOSTROKE_AVX512
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  for (int part = 0; part < 2; ++part) {
    float* out = (float*)&c + part * 8;
    __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps((float*)&a + part * 8),
                                 _mm256_loadu_ps((float*)&b + part * 8), _mm256_loadu_ps(out));
    _mm256_storeu_ps(out, sum);
  }
  return c;
#else
  return a * b + c;
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }  // b where either is NaN

inline f32x16 abs(f32x16 x) { return (f32x16)((i32x16)x & set1(0x7fffffff)); }

inline f32x16 to_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }

// Halves are added to halves: the order is the same on every CPU.
inline float sum(f32x16 x) {
#if TWOSTROKE_AVX512
  return _mm512_reduce_add_ps((__m512)x);  // in that very order
#else
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline float largest(f32x16 x) {
#if TWOSTROKE_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

// The first lane that holds `value`; -1: none does.
inline int find(f32x16 x, float value) {
#if TWOSTROKE_AVX512
  const __mmask16 equal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(value), _CMP_EQ_OQ);
  return equal ? __builtin_ctz(equal) : -1;
#else
  for (int i = 0; i < LANES; ++i)
    if (x[i] == value) return i;
  return -1;
#endif
}

// To the nearest integer, ties to even. |x| < 2**22.
inline f32x16 round(f32x16 x) {
#if TWOSTROKE_AVX512
  return (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const f32x16 shift = set1(12582912.0f);  // 1.5 * 2**23: what is added to it loses its fraction
  f32x16 shifted = x + shift;
  asm volatile("" : "+m"(shifted));  // the compiler must not cancel the two
  return shifted - shift;
#endif
}

inline i32x16 to_int(f32x16 x) { return __builtin_convertvector(round(x), i32x16); }

// exp(x) to 2 units in the last place for x <= 88; 0 below -87; NaN stays NaN. A polynomial on
// [-ln2/2, ln2/2] (Cephes' expf) times a power of two.
inline f32x16 exp(f32x16 x) {
  const f32x16 lowest = set1(-87.3f);
  const f32x16 clamped = x < lowest ? lowest : x;
  const f32x16 n = round(clamped * set1(1.44269504089f));
  f32x16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
#if TWOSTROKE_AVX512
  const f32x16 scaled = (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const i32x16 exponent = (__builtin_convertvector(n, i32x16) + set1(127)) << 23;
  const f32x16 scaled = p * (f32x16)exponent;
#endif
  return x < lowest ? f32x16{} : scaled;
}

// ---- narrow types

inline float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(float x) { return x; }

inline bf16 narrow(float x) {  // to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline f32x16 load(const bf16* from) {
#if TWOSTROKE_AVX512
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (f32x16)_mm512_slli_epi32(wide, 16);
#else
  f32x16 x;
  for (int i = 0; i < LANES; ++i) x[i] = widen(from[i]);
  return x;
#endif
}

inline void store(bf16* to, f32x16 x) {
#if TWOSTROKE_AVX512
  const __m256i narrowed = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  _mm256_storeu_si256((__m256i*)to, narrowed);
#else
  for (int i = 0; i < LANES; ++i) to[i] = narrow(x[i]);
#endif
}

// Every second number of 32 bfloat16, or all of 16 float32. Touches no others: their owner may be
// another thread.
template <int STEP>
inline void store_apart(float* to, f32x16 x) {
  static_assert(STEP == 1);
  store(to, x);
}

template <int STEP>
inline void store_apart(bf16* to, f32x16 x) {
  static_assert(STEP == 2);
#if TWOSTROKE_AVX512
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
  _mm512_mask_storeu_epi16(to, 0x55555555, wide);
#else
  for (int i = 0; i < LANES; ++i) to[i * STEP] = narrow(x[i]);
#endif
}

inline float widen_half(half x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  const bool finite = rest < 0x7c00;
  uint32_t bits = finite ? rest << 13 : 0x7f800000 | (rest & 0x3ff) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  if (finite) value *= 0x1p112f;  // the two exponents' biases; also right for subnormals
  return sign ? -value : value;
}

inline f32x16 load_half(const half* from) {
#if TWOSTROKE_AVX512
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  f32x16 x;
  for (int i = 0; i < LANES; ++i) x[i] = widen_half(from[i]);
  return x;
#endif
}

// ---- dot products within lanes

// sum[i] += u8 a[4i..4i+3] . s8 b[4i..4i+3]
inline i32x16 dot_u8_s8(i32x16 sum, i32x16 a, i32x16 b) {
#if TWOSTROKE_AVX512
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  for (int shift = 0; shift < 32; shift += 8) {
    const i32x16 left = (i32x16)((u32x16)a >> shift) & set1(0xff);
    const i32x16 right = (i32x16)((u32x16)b << (24 - shift)) >> 24;
    sum += left * right;
  }
  return sum;
#endif
}

// sum[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1], bfloat16 in pairs. (AVX-512 adds the odd product
// first and takes subnormals for zeros.)
inline f32x16 dot_bf16(f32x16 sum, i32x16 a, i32x16 b) {
#if TWOSTROKE_AVX512
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const i32x16 upper = set1((int32_t)0xffff0000);
  sum = fma((f32x16)(a & upper), (f32x16)(b & upper), sum);
  return fma((f32x16)(a << 16), (f32x16)(b << 16), sum);
#endif
}

}  // namespace twostroke
