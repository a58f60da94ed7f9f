// The tile registers of AMX and nothing else: eight of them, of 16 rows of 64 bytes at most.
//
// Where the compiler may use AMX, each function is one instruction. Tiles' numbers are part of it,
// so they are template arguments, which the compilers' own intrinsics cannot take (nor do g++ 12's
// say that a load reads memory). With TWOSTROKE_EMULATE_AMX, which only tests define, it is a loop
// over an array that does what Intel's manual says (Software Developer's Manual, volume 2:
// LDTILECFG, TILELOADD, TDPBSUD, TDPBF16PS) and ends the program where the CPU would trap.
//
// Not one of the instructions has run on a CPU yet: those at hand have none. tests/tiles_test.cpp
// says what is expected of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#if defined(TWOSTROKE_EMULATE_AMX)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#elif defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif
#if defined(TWOSTROKE_EMULATE_AMX) || \
    (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__))
#define TWOSTROKE_TILES 1
#endif

#if TWOSTROKE_TILES

namespace twostroke {

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16, TILE_BYTES = 64;  // at most; bytes of a row

struct TileShape {
  int rows, bytes;
};

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileConfig(std::initializer_list<TileShape> shapes) {
    int tile = 0;
    for (const TileShape& shape : shapes) {
      bytes[tile] = (uint16_t)shape.bytes;
      rows[tile++] = (uint8_t)shape.rows;
    }
  }
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(TWOSTROKE_EMULATE_AMX)

// Asks Linux for the tiles, for all threads of this process: once, before the first is used. 0, or
// errno where that is refused.
inline int request_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows `stride` bytes apart.
template <int TILE>
inline void load_tile(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store_tile(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// C[row][i] += s8 A[row][4j..4j+3] . u8 B[j][4i..4i+3], over all j: int32.
template <int C, int A, int B>
inline void dot_tiles_s8_u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C[row][i] += bfloat16 A[row][2j..2j+1] . B[j][2i..2i+1], over all j: float32. The even products
// are added up from zero in the order of j and so are the odd ones, their sums are added, and that
// is added to C; subnormals are zeros.
template <int C, int A, int B>
inline void dot_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct EmulatedTile {
  int rows = 0, bytes = 0;
  alignas(64) char data[TILE_ROWS][TILE_BYTES] = {};

  template <class Number>
  Number at(int row, int index) const {
    Number number;
    std::memcpy(&number, data[row] + index * sizeof number, sizeof number);
    return number;
  }
  template <class Number>
  void put(int row, int index, Number number) {
    std::memcpy(data[row] + index * sizeof number, &number, sizeof number);
  }
};

inline thread_local EmulatedTile emulated_tiles[NUM_TILES];

inline void trap_unless(bool allowed, const char* what) {
  if (allowed) return;
  std::fprintf(stderr, "the CPU would trap: %s\n", what);
  std::abort();
}

template <int TILE>
inline EmulatedTile& emulated_tile() {
  static_assert(TILE >= 0 && TILE < NUM_TILES);
  trap_unless(emulated_tiles[TILE].rows > 0, "a tile that is not configured");
  return emulated_tiles[TILE];
}

inline int request_tiles() { return 0; }

inline void configure_tiles(const TileConfig& config) {
  trap_unless(config.palette == 1 && config.start_row == 0, "another palette");
  for (int tile = 0; tile < NUM_TILES; ++tile) {
    const int rows = config.rows[tile], bytes = config.bytes[tile];
    trap_unless(rows <= TILE_ROWS && bytes <= TILE_BYTES && !rows == !bytes, "a tile's shape");
    emulated_tiles[tile] = EmulatedTile{rows, bytes};
  }
}

inline void release_tiles() {
  for (EmulatedTile& tile : emulated_tiles) tile = EmulatedTile{};
}

template <int TILE>
inline void zero_tile() {
  std::memset(emulated_tile<TILE>().data, 0, sizeof(EmulatedTile::data));
}

template <int TILE>
inline void load_tile(const void* from, size_t stride) {
  zero_tile<TILE>();
  EmulatedTile& tile = emulated_tile<TILE>();
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], (const char*)from + row * stride, tile.bytes);
}

template <int TILE>
inline void store_tile(void* to, size_t stride) {
  const EmulatedTile& tile = emulated_tile<TILE>();
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy((char*)to + row * stride, tile.data[row], tile.bytes);
}

template <int C, int A, int B>
inline void trap_unless_shapes_fit() {
  static_assert(C != A && C != B && A != B);
  const EmulatedTile &c = emulated_tile<C>(), &a = emulated_tile<A>(), &b = emulated_tile<B>();
  trap_unless(c.rows == a.rows && c.bytes == b.bytes && a.bytes == b.rows * 4 && b.bytes % 4 == 0,
              "shapes that do not fit");
}

template <int C, int A, int B>
inline void dot_tiles_s8_u8() {
  trap_unless_shapes_fit<C, A, B>();
  EmulatedTile& c = emulated_tile<C>();
  const EmulatedTile &a = emulated_tile<A>(), &b = emulated_tile<B>();
  for (int row = 0; row < c.rows; ++row)
    for (int j = 0; j < b.rows; ++j)
      for (int i = 0; i < c.bytes / 4; ++i) {
        uint32_t sum = c.at<uint32_t>(row, i);  // wraps
        for (int byte = 0; byte < 4; ++byte)
          sum += (uint32_t)(a.at<int8_t>(row, j * 4 + byte) * b.at<uint8_t>(j, i * 4 + byte));
        c.put(row, i, sum);
      }
}

inline float without_subnormal(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? x * 0.0f : x;
}

inline float emulated_bf16(const EmulatedTile& tile, int row, int index) {
  const uint32_t bits = (uint32_t)tile.at<uint16_t>(row, index) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return without_subnormal(number);
}

template <int C, int A, int B>
inline void dot_tiles_bf16() {
  trap_unless_shapes_fit<C, A, B>();
  EmulatedTile& c = emulated_tile<C>();
  const EmulatedTile &a = emulated_tile<A>(), &b = emulated_tile<B>();
  for (int row = 0; row < c.rows; ++row)
    for (int i = 0; i < c.bytes / 4; ++i) {
      float sums[2] = {};
      for (int j = 0; j < b.rows; ++j)
        for (int odd = 0; odd < 2; ++odd)
          sums[odd] = without_subnormal(std::fma(emulated_bf16(a, row, j * 2 + odd),
                                                 emulated_bf16(b, j, i * 2 + odd), sums[odd]));
      const float both = without_subnormal(sums[0] + sums[1]);
      c.put(row, i, without_subnormal(without_subnormal(c.at<float>(row, i)) + both));
    }
}

#endif

// Tiles of these shapes while it lives. Between products a thread has none: its 8 KB would be saved
// and loaded again at every switch to another thread.
class ConfiguredTiles {
 public:
  explicit ConfiguredTiles(const TileConfig& config) { configure_tiles(config); }
  ~ConfiguredTiles() { release_tiles(); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
};

}  // namespace twostroke

#endif
