// The library's face: C functions for ctypes, nothing of C++ crosses it.
#include <cerrno>
#include <new>

#include "stage.h"

using namespace twostroke;

namespace {

// `size` in steps of 16.
template <class To>
void convert(const float* x, size_t size, To* out) {
  for (size_t i = 0; i < size; i += LANES) store(out + i, load(x + i));
}

template <class Number>
void multiply(const Weight& weight, const Number* x, int num_rows, const float* bias, Number* out,
              int num_threads) {
  static thread_local Scratch scratch;
  Rows rows;
  float* wide;
  const size_t wide_stride = (size_t)weight.k + LANES;
  scratch.fit([&] {
    rows = rows_for(weight, take_rows(scratch, num_rows, weight.k));
    wide = scratch.take<float>(wide_stride * num_threads);
  });
  run_together(num_threads, [&](const Member& member) {
    float* row = wide + wide_stride * member.index;
    const Range mine = member.share(num_rows);
    for (int i = mine.begin; i < mine.end; ++i) {
      for (int k = 0; k < weight.k; ++k) row[k] = widen(x[(size_t)i * weight.k + k]);
      prepare_row(weight.format, row, weight.k, rows, i);
    }
    member.wait();
    const Range panels = member.share(weight.panels());
    matmul(weight, rows, num_rows, panels.begin, panels.end,
           [&](int i, int panel, f32x16 a, f32x16 b) {
             put(out + (size_t)i * weight.n, weight.n, bias, panel * PANEL, a, b);
           });
  });
}

// Rows of the step: numbers of one row stand together, rows `stride` numbers apart.
struct StepRows {
  const void* data;
  int64_t stride;
};

struct AttentionInputs {
  AttentionShape shape;
  int window;  // 0: none
  int num_sequences, table_width;
  const int32_t* query_lens;
  const int32_t* num_computed;
  const int32_t* block_tables;  // [num_sequences, table_width]
  int num_tokens;
  int is_bfloat16;  // query, key, value and out; else float32
  StepRows query, key, value;
  void* out;  // [num_tokens, heads, head_dim]
  KVLayer layer;
  KVType type;
};

template <class Element, class Number>
void attend(const AttentionInputs& inputs, int num_threads) {
  static thread_local Scratch scratch;
  const AttentionShape& shape = inputs.shape;
  const std::vector<SequenceShare> sequences =
      sequence_shares(inputs.num_sequences, inputs.query_lens, inputs.num_computed,
                      inputs.block_tables, inputs.table_width);
  const AttentionPlan<Element> plan(shape, sequences, inputs.window, num_threads);
  const PagedAttention<Element> attention(shape, inputs.layer);
  const size_t row_size = (size_t)shape.heads * shape.head_dim;
  const size_t query_stride = shape.heads * attention.query_bytes();
  typename PagedAttention<Element>::Step step{nullptr, nullptr, nullptr, inputs.window};
  char* queries;
  scratch.fit([&] {
    step.queries = queries = scratch.take<char>(inputs.num_tokens * query_stride);
    step.out = scratch.take<float>(inputs.num_tokens * row_size);
    step.partials = scratch.take<float>(plan.num_parts() * attention.partial_size());
  });
  std::atomic<int> next_task{0};
  run_together(num_threads, [&](const Member& member) {
    const Range rows = member.share(inputs.num_tokens);
    const auto row_of = [](const StepRows& x, int row) { return (const Number*)x.data + row * x.stride; };
    each_row(sequences, rows, [&](const SequenceShare& sequence, int row, int position) {
      attention.put_queries(row_of(inputs.query, row), queries + row * query_stride);
      attention.store_kv(sequence, position, row_of(inputs.key, row), row_of(inputs.value, row));
    });
    member.wait();
    plan.attend(attention, step, next_task, member);
    member.wait();
    Number* out = (Number*)inputs.out;
    convert(step.out + rows.begin * row_size, (rows.end - rows.begin) * row_size,
            out + rows.begin * row_size);
  });
}

#if TWOSTROKE_TILES
// One product by tiles and by vectors, of whole numbers so small that adding them up is exact in any
// order: the same bits.
bool tiles_multiply_as_vectors(Format format) {
  constexpr int K = 96;
  Weight weight{format, PANEL, is_grouped(format) ? K : K - 2, nullptr, nullptr, nullptr};
  std::vector<char> words(weight.panel_bytes());
  std::vector<half> halves(K / GROUP * PANEL, 0x3c00);  // ones
  for (size_t i = 0; i < words.size(); ++i) words[i] = (char)(i * 37 % 251);
  for (size_t i = 0; format == Format::BFLOAT16 && i < words.size() / 2; ++i) {
    const bf16 number = narrow((float)(i * 5 % 7) - 3);
    std::memcpy(&words[2 * i], &number, sizeof number);
  }
  weight.words = words.data(), weight.scales = weight.minimums = halves.data();
  Scratch scratch;
  Rows rows;
  scratch.fit([&] { rows = rows_for(weight, take_rows(scratch, TILE_ROWS, K)); });
  for (int row = 0; row < TILE_ROWS; ++row) {
    float x[K];
    for (int i = 0; i < K; ++i) x[i] = (float)((row + 3 * i) % 11 - 5);
    prepare_row(format, x, weight.k, rows, row);
  }
  alignas(64) float by_tiles[MAX_ROWS][PANEL], by_vectors[TILE_ROWS][PANEL];
  const ProductTiles tiles(format, TILE_ROWS);
  panel_product(weight, 0, rows, 0, TILE_ROWS, by_tiles[0]);
  vector_product(weight, 0, rows, 0, TILE_ROWS, by_vectors[0]);
  return std::memcmp(by_tiles, by_vectors, sizeof by_vectors) == 0;
}
#endif

// No exception crosses into C: 1 instead, where memory or threads cannot be had.
template <class Work>
int guarded(Work work) {
  try {
    work();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

extern "C" {

// Asks the system for what the kernels of this level need beyond the instructions, once and before
// any other call. 0, the system's error number, or -1 where tiles do not multiply as vectors do.
int ts_prepare() {
#if TWOSTROKE_TILES
  if (const int refused = request_tiles()) return refused;
  bool right = true;
  for (Format format : {Format::BFLOAT16, Format::INT8, Format::INT4})
    if (guarded([&] { right = right && tiles_multiply_as_vectors(format); })) return ENOMEM;
  if (!right) return -1;
#endif
  return 0;
}

// Each of these returns 0, or 1 where the machine had no memory or threads for it.

// x [num_rows, k] and out [num_rows, n], both bfloat16 or both float32; bias [n] or null.
int ts_matmul(const Weight* weight, const void* x, int num_rows, int is_bfloat16,
              const float* bias, void* out, int num_threads) {
  return guarded([&] {
    if (is_bfloat16)
      multiply(*weight, (const bf16*)x, num_rows, bias, (bf16*)out, num_threads);
    else
      multiply(*weight, (const float*)x, num_rows, bias, (float*)out, num_threads);
  });
}

// Writes the step's keys and values into one layer of the cache, and attends to all of it.
int ts_attention(const AttentionInputs* inputs, int num_threads) {
  return guarded([&] {
    with_element(inputs->type, [&](auto element) {
      inputs->is_bfloat16 ? attend<decltype(element), bf16>(*inputs, num_threads)
                          : attend<decltype(element), float>(*inputs, num_threads);
    });
  });
}

// Keeps pointers to weights and norms, not to `model`.
int ts_stage_new(const Model* model, Stage** stage) {
  return guarded([&] { *stage = new Stage(*model); });
}

void ts_stage_delete(Stage* stage) { delete stage; }

int ts_stage_run(Stage* stage, const Cache* cache, const StepInputs* inputs,
                 const StepOutputs* outputs, int num_threads) {
  return guarded([&] { stage->run(*cache, *inputs, *outputs, num_threads); });
}
}
