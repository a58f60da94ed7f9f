// What the kernels expect of the tile registers, by hand and by double loops: of the emulation, and
// of a CPU that has them. The order in which bfloat16 is added up is where the two could differ.
#include "../tiles.h"

#include <limits>

#include "check.h"

#if TWOSTROKE_TILES

using namespace twostroke;

namespace {

constexpr int C = 0, A = 1, B = 2;
constexpr int STRIDE = 80;  // bytes: more than a row has

template <class Number>
struct Buffer {  // rows STRIDE bytes apart, what lies between them is 7
  std::vector<char> data = std::vector<char>(TILE_ROWS * STRIDE, 7);

  void put(int row, int index, Number number) {
    std::memcpy(&data[row * STRIDE + index * sizeof number], &number, sizeof number);
  }
  Number at(int row, int index) const {
    Number number;
    std::memcpy(&number, &data[row * STRIDE + index * sizeof number], sizeof number);
    return number;
  }
};

void loads_and_stores_its_shape_only(int rows, int bytes) {
  const ConfiguredTiles tiles({{rows, bytes}});
  std::vector<char> from(rows * STRIDE - (STRIDE - bytes)), to(TILE_ROWS * STRIDE, 7);
  for (size_t i = 0; i < from.size(); ++i) from[i] = (char)(i * 11);
  load_tile<0>(from.data(), STRIDE);
  store_tile<0>(to.data(), STRIDE);
  for (int i = 0; i < TILE_ROWS * STRIDE; ++i) {
    const bool inside = i / STRIDE < rows && i % STRIDE < bytes;
    CHECK(to[i] == (inside ? from[i] : 7), "byte %d of %d rows of %d", i, rows, bytes);
  }
  zero_tile<0>();
  store_tile<0>(to.data(), STRIDE);
  CHECK(to[0] == 0 && to[(rows - 1) * STRIDE + bytes - 1] == 0 && to[bytes] == 7, "not zero");
}

void integers_equal_a_loop(int rows, int depth, int columns, Random& random) {
  const ConfiguredTiles tiles({{rows, columns * 4}, {rows, depth * 4}, {depth, columns * 4}});
  Buffer<int8_t> a;
  Buffer<uint8_t> b;
  Buffer<int32_t> c;
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < depth * 4; ++i) a.put(row, i, (int8_t)(i % 3 ? random.below(256) : -128));
  for (int row = 0; row < depth; ++row)
    for (int i = 0; i < columns * 4; ++i) b.put(row, i, (uint8_t)(i % 5 ? random.below(256) : 255));
  zero_tile<C>();
  load_tile<A>(a.data.data(), STRIDE);
  load_tile<B>(b.data.data(), STRIDE);
  dot_tiles_s8_u8<C, A, B>();
  dot_tiles_s8_u8<C, A, B>();  // adds
  store_tile<C>(c.data.data(), STRIDE);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      int sum = 0;
      for (int i = 0; i < depth * 4; ++i)
        sum += 2 * a.at(row, i) * b.at(i / 4, column * 4 + i % 4);
      CHECK(c.at(row, column) == sum, "%d, should be %d", c.at(row, column), sum);
    }
}

// c + (pairs of a) . (pairs of b), in every row and column of a tile.
float dot(float c, const std::vector<float>& a, const std::vector<float>& b) {
  const int depth = (int)a.size() / 2;
  const ConfiguredTiles tiles({{16, 64}, {16, depth * 4}, {depth, 64}});
  Buffer<float> sums;
  Buffer<bf16> left, right;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column) sums.put(row, column, c);
  for (int row = 0; row < 16; ++row)
    for (int i = 0; i < depth * 2; ++i) left.put(row, i, narrow(a[i]));
  for (int i = 0; i < depth * 2; ++i)
    for (int column = 0; column < 16; ++column) right.put(i / 2, column * 2 + i % 2, narrow(b[i]));
  load_tile<C>(sums.data.data(), STRIDE);
  load_tile<A>(left.data.data(), STRIDE);
  load_tile<B>(right.data.data(), STRIDE);
  dot_tiles_bf16<C, A, B>();
  store_tile<C>(sums.data.data(), STRIDE);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column)
      CHECK(std::memcmp(&sums.data[row * STRIDE + column * 4], &sums.data[0], 4) == 0,
            "row %d, column %d", row, column);
  return sums.at(0, 0);
}

void bfloat16_by_hand() {
  const float big = 0x1p24f, small = 0x1p-126f, endless = std::numeric_limits<float>::infinity();
  const auto is = [](const char* what, float found, float wanted) {
    expect_equal(what, 0, found, wanted);
    CHECK(std::signbit(found) == std::signbit(wanted), "%s: a zero's sign", what);
  };
  is("plain", dot(0.5f, {1, 2, 3, 4}, {5, 6, 7, 8}), 70.5f);
  is("even and odd apart", dot(0.5f, {big, 1, 1, 1, -big, 1}, {1, 1, 1, 1, 1, 1}), 3.5f);
  is("in order", dot(0, {1, 0, big, 0, -big, 0, 1, 0}, {1, 0, 1, 0, 1, 0, 1, 0}), 1);
  is("sum last", dot(big, {1, 1}, {1, 1}), big + 2);
  is("rounded to even", dot(0, {big, 0, 3, 0}, {1, 0, 1, 0}), big + 4);
  is("fused", dot(0, {small, 0, small, 0}, {1, 0, 0.5f, 0}), 1.5f * small);
  is("subnormal input", dot(0, {small / 2, 0}, {big, 0}), 0);
  is("subnormal weight", dot(0, {big, 0}, {-small / 2, 0}), 0);
  is("subnormal sum before", dot(small / 2, {small, 0}, {1, 0}), small);
  is("subnormal product", dot(0, {small, 0, small, 0}, {0.5f, 0, 0.5f, 0}), 0);
  is("subnormal sum of both", dot(small, {1.5f * small, -small}, {1, 1}), small);
  is("subnormal result", dot(1.5f * small, {-small, 0}, {1, 0}), 0);
  is("smallest", dot(0, {small, 0}, {1, 0}), small);
  is("infinite", dot(1, {endless, 1}, {2, 1}), endless);
  is("beyond the largest", dot(0, {0x1p127f, 0}, {2, 0}), endless);
  CHECK(std::isnan(dot(0, {endless, 0}, {0, 0})), "infinity times zero");
  CHECK(std::isnan(dot(0, {NAN, 0}, {1, 0})), "NaN");
}

}  // namespace

int main() {
  CHECK(request_tiles() == 0, "no tiles to be had");
  Random random(4);
  for (int rows : {1, 7, 16})
    for (int bytes : {4, 32, 64}) loads_and_stores_its_shape_only(rows, bytes);
  integers_equal_a_loop(16, 8, 16, random);
  integers_equal_a_loop(16, 16, 16, random);
  integers_equal_a_loop(3, 5, 7, random);
  bfloat16_by_hand();
}

#else

int main() {}

#endif
