// Rows times a packed weight matrix.
//
// A weight of n outputs and k inputs is held in panels of 32 outputs (the last one padded with
// zeros). Within a panel, the 4 bytes that one output has for the same inputs lie beside those of
// the other 31: [k * bytes / 4][32] words. So 16 outputs are one load, and a row's inputs are
// broadcast: no sum ever crosses lanes, and each output is added up in the order of its inputs
// however many rows there are. That makes a row's result independent of its neighbours.
//
//   float32   one input a word
//   bfloat16  two inputs a word; the row is rounded to bfloat16
//   int8      four codes (value / scale + 128) a word; scales [k / 32][32] float16
//   int4      eight codes of 0 to 15 a word, the first half of a group in the low nibbles; scales
//             and minimums [k / 32][32] float16: value = scale * code + minimum
//
// For int8 and int4 a row is rounded to 8 bits in groups of 32 inputs, as llama.cpp's Q8_1 is.
#pragma once

#include "vector.h"

namespace twostroke {

enum class Format : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

constexpr int PANEL = 32;
constexpr int GROUP = 32;
constexpr int MAX_ROWS = 6;  // 12 integer and 12 float sums, and 8 registers for all else

struct Weight {
  Format format;
  int n, k;
  const char* words;
  const half* scales;
  const half* minimums;

  int panels() const { return (n + PANEL - 1) / PANEL; }
  int groups() const { return k / GROUP; }
  size_t panel_bytes() const {
    switch (format) {
      case Format::FLOAT32: return (size_t)k * PANEL * 4;
      case Format::BFLOAT16: return (size_t)k * PANEL * 2;
      case Format::INT8: return (size_t)k * PANEL;
      default: return (size_t)k * PANEL / 2;
    }
  }
  const char* panel(int index) const { return words + panel_bytes() * index; }
  size_t group_index(int panel) const { return (size_t)panel * groups() * PANEL; }
};

inline bool is_grouped(Format format) { return format >= Format::INT8; }
inline size_t row_bytes(Format format, int k) {
  return is_grouped(format) ? k : format == Format::BFLOAT16 ? k * 2 : k * 4;
}

// Rows as a weight's format wants them. The last three only for int8 and int4: [rows][groups].
struct Rows {
  char* data;
  size_t stride;  // bytes
  int groups;
  float* scales;
  int32_t* offsets;  // -128 * sum of codes: takes back int8's shift of 128
  float* sums;       // scale * sum of codes: what a minimum is multiplied with

  char* row(int index) const { return data + stride * index; }
};

// Rounds a group of 32 inputs to 8 bits: the largest magnitude becomes 127. A group that is not
// finite becomes one whose scale is not.
inline void quantize_group(const float* x, int8_t* codes, float& scale, int32_t& offset,
                           float& sum_out) {
  const f32x16 low = load(x), high = load(x + LANES);
  const float peak = largest(max(abs(low), abs(high)));
  // The sum is not finite where one of them is not; max may lose a NaN.
  const float finite = sum(low * f32x16{} + high * f32x16{});
  scale = peak / 127.0f + finite;
  const bool has_codes = peak > 1e-30f && finite == 0.0f;
  const f32x16 inverse = set1(127.0f / peak);
  const i32x16 a = has_codes ? to_int(low * inverse) : i32x16{};
  const i32x16 b = has_codes ? to_int(high * inverse) : i32x16{};
  int32_t total = 0;
#if TWOSTROKE_AVX512
  _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8((__m512i)a));
  _mm_storeu_si128((__m128i*)(codes + LANES), _mm512_cvtepi32_epi8((__m512i)b));
  total = _mm512_reduce_add_epi32((__m512i)(a + b));
#else
  for (int i = 0; i < LANES; ++i) {
    codes[i] = (int8_t)a[i];
    codes[i + LANES] = (int8_t)b[i];
    total += a[i] + b[i];
  }
#endif
  offset = -128 * total;
  sum_out = scale * (float)total;
}

// One row of k float32 inputs, prepared for weights of this format.
inline void prepare_row(Format format, const float* x, int k, const Rows& rows, int index) {
  if (format == Format::FLOAT32) {
    std::memcpy(rows.row(index), x, (size_t)k * sizeof(float));
  } else if (format == Format::BFLOAT16) {
    bf16* out = (bf16*)rows.row(index);
    int i = 0;
    for (; i + LANES <= k; i += LANES) store(out + i, load(x + i));
    for (; i < k; ++i) out[i] = narrow(x[i]);
  } else {
    const size_t first = (size_t)index * rows.groups;
    int8_t* codes = (int8_t*)rows.row(index);
    for (int group = 0; group < rows.groups; ++group)
      quantize_group(x + group * GROUP, codes + group * GROUP, rows.scales[first + group],
                     rows.offsets[first + group], rows.sums[first + group]);
  }
}

constexpr int PREFETCH = 4096;  // bytes ahead: several pages of latency at memory speed

inline void prefetch(const char* address) { __builtin_prefetch(address + PREFETCH, 0, 3); }

// Each kernel: R rows from `first` times one panel -> tile [R][32].

template <int R>
inline void panel_float32(const Weight& weight, int panel, const Rows& rows, int first,
                          float* tile) {
  const char* words = weight.panel(panel);
  const char* x = rows.row(first);
  f32x16 sums[R][2] = {};
  for (int k = 0; k < weight.k; ++k, words += 128) {
    prefetch(words);
    prefetch(words + 64);
    const f32x16 left = load_as<f32x16>(words), right = load_as<f32x16>(words + 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 input = (f32x16)broadcast_bits(x + r * rows.stride + 4 * k);
      sums[r][0] = fma(input, left, sums[r][0]);
      sums[r][1] = fma(input, right, sums[r][1]);
    }
  }
  std::memcpy(tile, sums, sizeof sums);
}

template <int R>
inline void panel_bfloat16(const Weight& weight, int panel, const Rows& rows, int first,
                           float* tile) {
  const char* words = weight.panel(panel);
  const char* x = rows.row(first);
  f32x16 sums[R][2] = {};
  for (int k = 0; k < weight.k; k += 2, words += 128) {
    prefetch(words);
    prefetch(words + 64);
    const i32x16 left = load_bits(words), right = load_bits(words + 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const i32x16 input = broadcast_bits(x + r * rows.stride + 2 * k);
      sums[r][0] = dot_bf16(sums[r][0], left, input);
      sums[r][1] = dot_bf16(sums[r][1], right, input);
    }
  }
  std::memcpy(tile, sums, sizeof sums);
}

template <int R>
inline void panel_int8(const Weight& weight, int panel, const Rows& rows, int first, float* tile) {
  const char* words = weight.panel(panel);
  const half* scales = weight.scales + weight.group_index(panel);
  const char* x = rows.row(first);
  const size_t row_groups = (size_t)first * rows.groups;
  f32x16 sums[R][2] = {};
  for (int group = 0; group < rows.groups; ++group, scales += PANEL) {
    i32x16 dots[R][2];
    for (int r = 0; r < R; ++r)
      dots[r][0] = dots[r][1] = set1(rows.offsets[row_groups + (size_t)r * rows.groups + group]);
#pragma GCC unroll 8
    for (int word = 0; word < 8; ++word, words += 128) {
      prefetch(words);
      prefetch(words + 64);
      const i32x16 left = load_bits(words), right = load_bits(words + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const i32x16 input = broadcast_bits(x + r * rows.stride + group * GROUP + word * 4);
        dots[r][0] = dot_u8_s8(dots[r][0], left, input);
        dots[r][1] = dot_u8_s8(dots[r][1], right, input);
      }
    }
    const f32x16 left = load_half(scales), right = load_half(scales + LANES);
    for (int r = 0; r < R; ++r) {
      const f32x16 scale = set1(rows.scales[row_groups + (size_t)r * rows.groups + group]);
      sums[r][0] = fma(to_float(dots[r][0]) * scale, left, sums[r][0]);
      sums[r][1] = fma(to_float(dots[r][1]) * scale, right, sums[r][1]);
    }
  }
  std::memcpy(tile, sums, sizeof sums);
}

template <int R>
inline void panel_int4(const Weight& weight, int panel, const Rows& rows, int first, float* tile) {
  const char* words = weight.panel(panel);
  const half* scales = weight.scales + weight.group_index(panel);
  const half* minimums = weight.minimums + weight.group_index(panel);
  const char* x = rows.row(first);
  const size_t row_groups = (size_t)first * rows.groups;
  const i32x16 nibble = set1(0x0f0f0f0f);
  f32x16 sums[R][2] = {};
  for (int group = 0; group < rows.groups; ++group, scales += PANEL, minimums += PANEL) {
    i32x16 dots[R][2] = {};
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word, words += 128) {
      prefetch(words);
      prefetch(words + 64);
      const i32x16 left = load_bits(words), right = load_bits(words + 64);
      const i32x16 low_left = left & nibble, low_right = right & nibble;
      const i32x16 high_left = (i32x16)((u32x16)left >> 4) & nibble;
      const i32x16 high_right = (i32x16)((u32x16)right >> 4) & nibble;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const char* input = x + r * rows.stride + group * GROUP + word * 4;
        const i32x16 low = broadcast_bits(input), high = broadcast_bits(input + GROUP / 2);
        dots[r][0] = dot_u8_s8(dots[r][0], low_left, low);
        dots[r][1] = dot_u8_s8(dots[r][1], low_right, low);
        dots[r][0] = dot_u8_s8(dots[r][0], high_left, high);
        dots[r][1] = dot_u8_s8(dots[r][1], high_right, high);
      }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      const f32x16 scale = load_half(scales + LANES * side);
      const f32x16 minimum = load_half(minimums + LANES * side);
      for (int r = 0; r < R; ++r) {
        const size_t index = row_groups + (size_t)r * rows.groups + group;
        const f32x16 scaled = to_float(dots[r][side]) * set1(rows.scales[index]);
        sums[r][side] = fma(minimum, set1(rows.sums[index]), fma(scaled, scale, sums[r][side]));
      }
    }
  }
  std::memcpy(tile, sums, sizeof sums);
}

using PanelKernel = void (*)(const Weight&, int panel, const Rows&, int first, float* tile);

template <int R>
inline PanelKernel panel_kernel(Format format) {
  switch (format) {
    case Format::FLOAT32: return panel_float32<R>;
    case Format::BFLOAT16: return panel_bfloat16<R>;
    case Format::INT8: return panel_int8<R>;
    default: return panel_int4<R>;
  }
}

inline PanelKernel panel_kernel(Format format, int num_rows) {
  switch (num_rows) {
    case 1: return panel_kernel<1>(format);
    case 2: return panel_kernel<2>(format);
    case 3: return panel_kernel<3>(format);
    case 4: return panel_kernel<4>(format);
    case 5: return panel_kernel<5>(format);
    default: return panel_kernel<6>(format);
  }
}

// take(panel, first row, last row) for each panel of [begin, end) and blocks of MAX_ROWS rows at
// most, sizes as equal as can be.
template <class Take>
inline void each_panel_block(int num_rows, int begin, int end, Take take) {
  const int num_blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  const auto start = [&](int block) { return (int)((int64_t)num_rows * block / num_blocks); };
  for (int panel = begin; panel < end; ++panel)
    for (int block = 0; block < num_blocks; ++block) take(panel, start(block), start(block + 1));
}

// For each panel of [begin, end) and each of the rows [0, num_rows):
// take(row, panel, its outputs 0 to 15, its outputs 16 to 31).
template <class Take>
inline void matmul(const Weight& weight, const Rows& rows, int num_rows, int begin, int end,
                   Take take) {
  alignas(64) float tile[MAX_ROWS][PANEL];
  each_panel_block(num_rows, begin, end, [&](int panel, int first, int last) {
    panel_kernel(weight.format, last - first)(weight, panel, rows, first, tile[0]);
    for (int row = first; row < last; ++row)
      take(row, panel, load(tile[row - first]), load(tile[row - first] + LANES));
  });
}

// Outputs [first, first + 32) of a row of `size`, which may end before.
template <class Number>
inline void put(Number* row, int size, const float* bias, int first, f32x16 a, f32x16 b) {
  alignas(64) float sums[PANEL];
  const int count = size - first < PANEL ? size - first : PANEL;
  store(sums, a), store(sums + LANES, b);
  if (bias)
    for (int i = 0; i < count; ++i) sums[i] += bias[first + i];
  if (count == PANEL) {
    store(row + first, load(sums));
    store(row + first + LANES, load(sums + LANES));
    return;
  }
  for (int i = 0; i < count; ++i) {
    if constexpr (sizeof(Number) == 2)
      row[first + i] = narrow(sums[i]);
    else
      row[first + i] = sums[i];
  }
}

}  // namespace twostroke
