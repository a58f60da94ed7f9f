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
//
// Where the CPU has tiles, 16 rows at a time are multiplied by them; 16 outputs of a panel are a
// tile as they lie. Integers have no order, and what is done to them afterwards is the same, so in
// int8 and int4 tiles and vectors give the same bits, and few rows are left to vectors. In bfloat16
// a tile adds up in an order of its own, so all rows go through tiles, a single one too.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "tiles.h"
#include "vector.h"

namespace twostroke {

enum class Format : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

constexpr int PANEL = 32;
constexpr int GROUP = 32;
constexpr int VECTOR_ROWS = 6;  // 12 integer and 12 float sums, and 8 registers for all else
#if TWOSTROKE_TILES
constexpr int ROW_STEP = TILE_ROWS;  // a tile reads 16 rows, so buffers hold a multiple of it
constexpr int MAX_ROWS = 64;         // four tiles of rows for each int4 code that is unpacked
#else
constexpr int ROW_STEP = 1;
constexpr int MAX_ROWS = VECTOR_ROWS;
#endif

constexpr int round_up(int count, int step) { return (count + step - 1) / step * step; }

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
  if (format == Format::BFLOAT16) return round_up(k * 2, ROW_STEP * 4);  // zeros behind k
  return is_grouped(format) ? k : k * 4;
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
    std::memset(out + k, 0, rows.stride - (size_t)k * sizeof(bf16));
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

// What a group adds to 16 sums of a row. `scale` is the row's, scales are the weight's.
inline f32x16 add_group(f32x16 sums, i32x16 dots, float scale, f32x16 scales) {
  return fma(to_float(dots) * set1(scale), scales, sums);
}

inline f32x16 add_minimums(f32x16 sums, float row_sum, f32x16 minimums) {
  return fma(minimums, set1(row_sum), sums);
}

// Each kernel: R rows from `first` times one panel -> out [R][32].

template <int R>
inline void panel_float32(const Weight& weight, int panel, const Rows& rows, int first,
                          float* out) {
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
  std::memcpy(out, sums, sizeof sums);
}

template <int R>
inline void panel_bfloat16(const Weight& weight, int panel, const Rows& rows, int first,
                           float* out) {
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
  std::memcpy(out, sums, sizeof sums);
}

template <int R>
inline void panel_int8(const Weight& weight, int panel, const Rows& rows, int first, float* out) {
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
      const float scale = rows.scales[row_groups + (size_t)r * rows.groups + group];
      sums[r][0] = add_group(sums[r][0], dots[r][0], scale, left);
      sums[r][1] = add_group(sums[r][1], dots[r][1], scale, right);
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

inline i32x16 low_codes(i32x16 words) { return words & set1(0x0f0f0f0f); }
inline i32x16 high_codes(i32x16 words) { return low_codes((i32x16)((u32x16)words >> 4)); }

template <int R>
inline void panel_int4(const Weight& weight, int panel, const Rows& rows, int first, float* out) {
  const char* words = weight.panel(panel);
  const half* scales = weight.scales + weight.group_index(panel);
  const half* minimums = weight.minimums + weight.group_index(panel);
  const char* x = rows.row(first);
  const size_t row_groups = (size_t)first * rows.groups;
  f32x16 sums[R][2] = {};
  for (int group = 0; group < rows.groups; ++group, scales += PANEL, minimums += PANEL) {
    i32x16 dots[R][2] = {};
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word, words += 128) {
      prefetch(words);
      prefetch(words + 64);
      const i32x16 left = load_bits(words), right = load_bits(words + 64);
      const i32x16 low_left = low_codes(left), low_right = low_codes(right);
      const i32x16 high_left = high_codes(left), high_right = high_codes(right);
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
        sums[r][side] = add_group(sums[r][side], dots[r][side], rows.scales[index], scale);
        sums[r][side] = add_minimums(sums[r][side], rows.sums[index], minimum);
      }
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

using PanelKernel = void (*)(const Weight&, int panel, const Rows&, int first, float* out);

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

// take(first, last) for blocks of `most` at most, of sizes as equal as multiples of `step` can be.
template <class Take>
inline void even_blocks(int count, int most, int step, Take take) {
  const int num_blocks = (count + most - 1) / most;
  const auto start = [&](int block) {
    return std::min(count, round_up((int)((int64_t)count * block / num_blocks), step));
  };
  for (int block = 0; block < num_blocks; ++block) take(start(block), start(block + 1));
}

// Rows [first, last) times a panel, by vectors -> out [last - first][32].
inline void vector_product(const Weight& weight, int panel, const Rows& rows, int first, int last,
                           float* out) {
  even_blocks(last - first, VECTOR_ROWS, 1, [&](int begin, int end) {
    const PanelKernel kernel = panel_kernel(weight.format, end - begin);
    kernel(weight, panel, rows, first + begin, out + begin * PANEL);
  });
}

#if TWOSTROKE_TILES

// On paper, not measured (Sapphire Rapids: a tile product in 16 cycles, two 512-bit ports, two loads
// a cycle): for a group of 32 inputs and 16 outputs vectors need 11 instructions a row, 5.5 cycles.
// 16 rows by tiles are done in 36 cycles: 24 for the 48 loads of dots, scales and offsets, 12 for
// the two tiles' loads; the four vector instructions a row take 32 beside them. So tiles pay from
// 8 rows on, and 16 rows take 2.4 times less.
constexpr int FEWEST_TILED_ROWS = 8;
constexpr int CHUNK = 16;  // groups at a time: 16 KB of int4 codes as bytes, 8 KB of 16 rows

// Two products take turns, so that one is multiplied while the other's dots are scaled: tiles of
// dots, of 16 rows of a group, and of 16 outputs of a group.
constexpr TileConfig GROUP_TILES = {{16, 64}, {16, 64}, {16, 32}, {16, 32}, {8, 64}, {8, 64}};

// Four of sums, for 32 rows and 32 outputs; two of 16 rows, two of 16 outputs, of 32 inputs.
constexpr TileConfig BFLOAT16_TILES = {{16, 64}, {16, 64}, {16, 64}, {16, 64},
                                       {16, 64}, {16, 64}, {16, 64}, {16, 64}};

// How many tiles of rows; the rows behind them are for vectors.
inline int num_row_tiles(Format format, int num_rows) {
  if (format == Format::FLOAT32) return 0;
  const int fewest = format == Format::BFLOAT16 ? 1 : FEWEST_TILED_ROWS;
  return (num_rows + TILE_ROWS - fewest) / TILE_ROWS;
}

// 16 outputs of some groups of a panel: words [(end - begin) * 8][32], scales and minimums from
// `begin` on.
struct Groups {
  int begin, end;
  const char* words;
  const half* scales;
  const half* minimums;
  bool is_new;  // to the cache: what follows is fetched
};

template <int TURN>
inline void multiply_group(const char* inputs, size_t stride, const char* words,
                           int32_t (*dots)[LANES]) {
  zero_tile<TURN>();
  load_tile<2 + TURN>(inputs, stride);
  load_tile<4 + TURN>(words, PANEL * 4);
  dot_tiles_s8_u8<TURN, 2 + TURN, 4 + TURN>();
  store_tile<TURN>(dots, sizeof *dots);
}

// Adds some groups of 16 rows and 16 outputs to out [16][32].
template <Format FORMAT>
inline void add_groups(const Groups& groups, const Rows& rows, int first, float* out) {
  constexpr int GROUP_WORDS = GROUP * PANEL;  // bytes
  alignas(64) int32_t dots[2][TILE_ROWS][LANES];
  f32x16 sums[TILE_ROWS];
  const size_t row_groups = (size_t)first * rows.groups, stride = rows.groups;
  const float *row_scales = rows.scales + row_groups, *row_sums = rows.sums + row_groups;
  const int32_t* offsets = rows.offsets + row_groups;
  const char *inputs = rows.row(first), *words = groups.words;
  const half *scales = groups.scales, *minimums = groups.minimums;
  const size_t row_bytes = rows.stride;
  const int begin = groups.begin, end = groups.end;
  const bool is_new = groups.is_new;
  const auto multiply = [&](auto turn, int group) __attribute__((always_inline)) {
    if (group >= end) return;
    const char* from = words + (size_t)(group - begin) * GROUP_WORDS;
    for (int line = 0; is_new && line < GROUP_WORDS; line += 64) prefetch(from + line);
    multiply_group<turn()>(inputs + group * GROUP, row_bytes, from, dots[turn()]);
  };
  const auto scale = [&](auto turn, int group) __attribute__((always_inline)) {
    if (group >= end) return;
    const f32x16 scale = load_half(scales + (group - begin) * PANEL);
    f32x16 minimum;
    if constexpr (FORMAT == Format::INT4) minimum = load_half(minimums + (group - begin) * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) {
      i32x16 row = load_bits(dots[turn()][r]);
      if constexpr (FORMAT == Format::INT8) row += set1(offsets[r * stride + group]);
      sums[r] = add_group(sums[r], row, row_scales[r * stride + group], scale);
      if constexpr (FORMAT == Format::INT4)
        sums[r] = add_minimums(sums[r], row_sums[r * stride + group], minimum);
    }
  };
  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 1> odd;
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; ++r) sums[r] = load(out + r * PANEL);
  multiply(even, begin);
  for (int group = begin; group < end; group += 2) {
    multiply(odd, group + 1);
    scale(even, group);
    multiply(even, group + 2);
    scale(odd, group + 1);
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; ++r) store(out + r * PANEL, sums[r]);
}

// Codes of int4 groups as bytes, in the order of int8's.
inline void unpack_int4(const char* words, int num_groups, char* out) {
  for (; num_groups > 0; --num_groups, out += GROUP * PANEL)
    for (int vector = 0; vector < GROUP / 2 * PANEL; vector += 64, words += 64) {
      prefetch(words);
      const i32x16 codes = load_bits(words), low = low_codes(codes), high = high_codes(codes);
      std::memcpy(out + vector, &low, sizeof low);
      std::memcpy(out + GROUP / 2 * PANEL + vector, &high, sizeof high);
    }
}

// Tiles of 16 rows from `first` on times a panel -> out [16 * num_tiles][32].
template <Format FORMAT>
inline void grouped_tiles(const Weight& weight, int panel, const Rows& rows, int first,
                          int num_tiles, float* out) {
  alignas(64) char codes[FORMAT == Format::INT4 ? CHUNK * GROUP * PANEL : 1];
  const size_t group_bytes = weight.panel_bytes() / weight.groups();
  std::memset(out, 0, (size_t)num_tiles * TILE_ROWS * PANEL * sizeof *out);
  for (int begin = 0; begin < weight.groups(); begin += CHUNK) {
    const int end = std::min(begin + CHUNK, weight.groups());
    const char* words = weight.panel(panel) + begin * group_bytes;
    if constexpr (FORMAT == Format::INT4) unpack_int4(words, end - begin, codes), words = codes;
    const size_t scales = weight.group_index(panel) + (size_t)begin * PANEL;
    for (int tile = 0; tile < num_tiles; ++tile)
      for (int lane = 0; lane < PANEL; lane += LANES) {
        const Groups groups{begin, end, words + lane * 4, weight.scales + scales + lane,
                            FORMAT == Format::INT4 ? weight.minimums + scales + lane : nullptr,
                            FORMAT == Format::INT8 && tile == 0 && lane == 0};
        add_groups<FORMAT>(groups, rows, first + tile * TILE_ROWS,
                           out + tile * TILE_ROWS * PANEL + lane);
      }
  }
}

// NUM_TILES of 16 rows from `first` on times a panel -> out [16 * NUM_TILES][32]. Of four tiles of
// sums each is loaded for two products, the least that eight registers allow.
template <int NUM_TILES>
inline void bfloat16_tiles(const Weight& weight, int panel, const Rows& rows, int first,
                           bool is_new, float* out) {
  constexpr int STEP = TILE_BYTES / 2, STEP_WORDS = STEP * PANEL * 2;  // inputs, bytes of a panel
  const char *words = weight.panel(panel), *inputs = rows.row(first);
  const size_t stride = rows.stride;
  zero_tile<0>(), zero_tile<1>();
  if constexpr (NUM_TILES == 2) zero_tile<2>(), zero_tile<3>();
  const auto add = [&](const char* words) {
    load_tile<6>(words, PANEL * 4);
    load_tile<4>(inputs, stride);
    dot_tiles_bf16<0, 4, 6>();
    load_tile<7>(words + LANES * 4, PANEL * 4);
    dot_tiles_bf16<1, 4, 7>();
    if constexpr (NUM_TILES == 2) {
      load_tile<5>(inputs + TILE_ROWS * stride, stride);
      dot_tiles_bf16<2, 5, 6>();
      dot_tiles_bf16<3, 5, 7>();
    }
    inputs += TILE_BYTES;
  };
  int k = 0;
  for (; k + STEP <= weight.k; k += STEP, words += STEP_WORDS) {
    for (int line = 0; is_new && line < STEP_WORDS; line += 64) prefetch(words + line);
    add(words);
  }
  if (k < weight.k) {  // what is not there is zero, here and in the rows
    alignas(64) char last[STEP_WORDS] = {};
    std::memcpy(last, words, (size_t)(weight.k - k) * PANEL * 2);
    add(last);
  }
  store_tile<0>(out, PANEL * 4);
  store_tile<1>(out + LANES, PANEL * 4);
  if constexpr (NUM_TILES == 2) {
    store_tile<2>(out + TILE_ROWS * PANEL, PANEL * 4);
    store_tile<3>(out + TILE_ROWS * PANEL + LANES, PANEL * 4);
  }
}

inline void bfloat16_tiles(const Weight& weight, int panel, const Rows& rows, int first,
                           int num_tiles, float* out) {
  for (int tile = 0; tile < num_tiles; tile += 2) {
    const auto kernel = tile + 1 < num_tiles ? bfloat16_tiles<2> : bfloat16_tiles<1>;
    kernel(weight, panel, rows, first + tile * TILE_ROWS, tile == 0,
           out + tile * TILE_ROWS * PANEL);
  }
}

inline void tile_product(const Weight& weight, int panel, const Rows& rows, int first,
                         int num_tiles, float* out) {
  switch (weight.format) {
    case Format::FLOAT32: return;
    case Format::BFLOAT16: return bfloat16_tiles(weight, panel, rows, first, num_tiles, out);
    case Format::INT8:
      return grouped_tiles<Format::INT8>(weight, panel, rows, first, num_tiles, out);
    case Format::INT4:
      return grouped_tiles<Format::INT4>(weight, panel, rows, first, num_tiles, out);
  }
}

#endif

// What each_panel_block sets up for panel_product, for rows of this number and one weight's format.
class ProductTiles {
 public:
  ProductTiles(Format format, int num_rows) {
#if TWOSTROKE_TILES
    if (num_row_tiles(format, num_rows))
      tiles_.emplace(is_grouped(format) ? GROUP_TILES : BFLOAT16_TILES);
#else
    (void)format, (void)num_rows;
#endif
  }

#if TWOSTROKE_TILES
 private:
  std::optional<ConfiguredTiles> tiles_;
#endif
};

// Rows [first, last), at most MAX_ROWS, times a panel -> out [MAX_ROWS][32]; what is behind the
// last row is of no meaning.
inline void panel_product(const Weight& weight, int panel, const Rows& rows, int first, int last,
                          float* out) {
#if TWOSTROKE_TILES
  if (const int num_tiles = num_row_tiles(weight.format, last - first)) {
    tile_product(weight, panel, rows, first, num_tiles, out);
    first += num_tiles * TILE_ROWS, out += num_tiles * TILE_ROWS * PANEL;
  }
  vector_product(weight, panel, rows, first, last, out);
#else
  panel_kernel(weight.format, last - first)(weight, panel, rows, first, out);
#endif
}

// take(panel, first row, last row) for each panel of [begin, end) and blocks of MAX_ROWS rows at
// most. Inside it panel_product may be called for weights of this format.
template <class Take>
inline void each_panel_block(Format format, int num_rows, int begin, int end, Take take) {
  const ProductTiles tiles(format, num_rows);
  for (int panel = begin; panel < end; ++panel)
    even_blocks(num_rows, MAX_ROWS, ROW_STEP,
                [&](int first, int last) { take(panel, first, last); });
}

// For each panel of [begin, end) and each of the rows [0, num_rows):
// take(row, panel, its outputs 0 to 15, its outputs 16 to 31).
template <class Take>
inline void matmul(const Weight& weight, const Rows& rows, int num_rows, int begin, int end,
                   Take take) {
  alignas(64) float sums[MAX_ROWS][PANEL];
  each_panel_block(weight.format, num_rows, begin, end, [&](int panel, int first, int last) {
    panel_product(weight, panel, rows, first, last, sums[0]);
    for (int row = first; row < last; ++row)
      take(row, panel, load(sums[row - first]), load(sums[row - first] + LANES));
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
