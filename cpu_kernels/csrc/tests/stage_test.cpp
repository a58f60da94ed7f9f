// Whole steps through the library's face, in buffers of exactly the promised size: the same bits on
// one, two and three threads, and in one step or several. (That they are the right numbers,
// tests/unit/test_fused_stage.py shows.)
#include "../kernels.cpp"
#include "check.h"

namespace {

constexpr int NUM_LAYERS = 2, NUM_BLOCKS = 6;

// `hidden` and `vocab` need not fill vectors or panels.
struct Sizes {
  int hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, vocab, block_size;
};

struct Vectors {
  std::vector<float> qkv_bias, output_bias, gate_up_bias, down_bias;
  std::vector<float> input_norm, post_attention_norm, query_norm, key_norm;
};

class TinyModel {
 public:
  TinyModel(const Sizes& sizes, Format format, Random& random)
      : sizes(sizes), final_norm_(random.normals(sizes.hidden)) {
    const int queries = sizes.heads * sizes.head_dim;
    const int qkv = queries + 2 * sizes.kv_heads * sizes.head_dim;
    const auto matrix = [&](int n, int k) -> const Weight& {
      matrices_.push_back(std::make_unique<Matrix>(format, n, k, random));
      return matrices_.back()->weight;
    };
    for (int i = 0; i < NUM_LAYERS; ++i) {
      vectors_[i] = {random.normals(qkv), random.normals(sizes.hidden),
                     random.normals(2 * sizes.intermediate), random.normals(sizes.hidden),
                     random.normals(sizes.hidden), random.normals(sizes.hidden),
                     random.normals(sizes.head_dim), random.normals(sizes.head_dim)};
      const Vectors& own = vectors_[i];
      const bool plain = i == 0;  // without what a layer may lack
      layers_[i] = {matrix(qkv, sizes.hidden), matrix(sizes.hidden, queries),
                    matrix(2 * sizes.intermediate, sizes.hidden),
                    matrix(sizes.hidden, sizes.intermediate),
                    plain ? nullptr : own.qkv_bias.data(), plain ? nullptr : own.output_bias.data(),
                    plain ? nullptr : own.gate_up_bias.data(),
                    plain ? nullptr : own.down_bias.data(), own.input_norm.data(),
                    own.post_attention_norm.data(), plain ? nullptr : own.query_norm.data(),
                    plain ? nullptr : own.key_norm.data(), plain ? 9 : 0, plain};
    }
    for (int i = 0; i < sizes.rotary_dim / 2; ++i)
      frequencies_.push_back(1.0f / (float)(1 + 3 * i));
    const Model model{sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads,
                      sizes.head_dim, sizes.rotary_dim, NUM_LAYERS, sizes.vocab, 1e-5f, 0.25f, 0,
                      1.1f, frequencies_.data(), layers_, matrix(sizes.vocab, sizes.hidden),
                      matrix(sizes.vocab, sizes.hidden), final_norm_.data()};
    Stage* stage = nullptr;
    CHECK(ts_stage_new(&model, &stage) == 0, "no stage");
    stage_.reset(stage);
  }

  Stage* stage() const { return stage_.get(); }
  const Sizes sizes;

 private:
  struct Delete {
    void operator()(Stage* stage) const { ts_stage_delete(stage); }
  };
  std::vector<std::unique_ptr<Matrix>> matrices_;
  Vectors vectors_[NUM_LAYERS];
  Layer layers_[NUM_LAYERS];
  std::vector<float> frequencies_, final_norm_;
  std::unique_ptr<Stage, Delete> stage_;
};

template <class Element>
struct Memory {
  std::vector<char> cache;
  explicit Memory(const Sizes& sizes)
      : cache((size_t)NUM_LAYERS * 2 * NUM_BLOCKS * sizes.kv_heads * sizes.block_size *
              PagedAttention<Element>::row_bytes(sizes.head_dim)) {}
  static constexpr KVType type() {
    return sizeof(Element) == 4   ? KVType::FLOAT32
           : sizeof(Element) == 2 ? KVType::BFLOAT16
                                  : KVType::INT8;
  }
};

struct Outputs {
  std::vector<float> hidden, logits;
  std::vector<int64_t> likeliest;
  std::vector<uint8_t> finite;
};

struct Share {
  std::vector<int64_t> token_ids;
  int num_computed;
  std::vector<int32_t> blocks;
};

template <class Element>
Outputs run(const TinyModel& model, Memory<Element>& memory, const std::vector<Share>& shares,
            int num_threads) {
  const Sizes& sizes = model.sizes;
  std::vector<int64_t> token_ids;
  std::vector<int32_t> query_lens, num_computed, rows;
  size_t width = 0;
  for (const Share& share : shares) width = std::max(width, share.blocks.size());
  std::vector<int32_t> tables(width * shares.size());
  for (size_t i = 0; i < shares.size(); ++i) {
    token_ids.insert(token_ids.end(), shares[i].token_ids.begin(), shares[i].token_ids.end());
    query_lens.push_back((int32_t)shares[i].token_ids.size());
    num_computed.push_back(shares[i].num_computed);
    std::copy(shares[i].blocks.begin(), shares[i].blocks.end(), tables.begin() + i * width);
    rows.push_back((int32_t)token_ids.size() - 1);
  }
  token_ids.shrink_to_fit(), query_lens.shrink_to_fit(), num_computed.shrink_to_fit();
  rows.shrink_to_fit();
  Outputs out{std::vector<float>(token_ids.size() * sizes.hidden),
              std::vector<float>(rows.size() * sizes.vocab), std::vector<int64_t>(rows.size()),
              std::vector<uint8_t>(shares.size())};
  const Cache cache{memory.cache.data(), NUM_BLOCKS, sizes.block_size, Memory<Element>::type()};
  const StepInputs inputs{(int)token_ids.size(), token_ids.data(), (int)shares.size(),
                          query_lens.data(), num_computed.data(), tables.data(), (int)width,
                          (int)rows.size(), rows.data()};
  const StepOutputs outputs{out.hidden.data(), out.logits.data(), out.likeliest.data(),
                            out.finite.data()};
  CHECK(ts_stage_run(model.stage(), &cache, &inputs, &outputs, num_threads) == 0, "no step");
  return out;
}

void check_outputs(const Outputs& out, const Sizes& sizes) {
  for (float number : out.hidden) CHECK(std::isfinite(number), "%g", number);
  for (uint8_t finite : out.finite) CHECK(finite == 1, "%d", finite);
  for (size_t row = 0; row < out.likeliest.size(); ++row) {
    const float* logits = &out.logits[row * sizes.vocab];
    const int64_t likeliest = std::max_element(logits, logits + sizes.vocab) - logits;
    CHECK(out.likeliest[row] == likeliest, "row %zu", row);
  }
}

std::vector<int64_t> tokens(int first, int count, const Sizes& sizes) {
  std::vector<int64_t> ids;
  for (int i = first; i < first + count; ++i) ids.push_back((i * 7 + 3) % sizes.vocab);
  return ids;
}

template <class Element>
void test(const Sizes& sizes, Format format, Random& random) {
  const TinyModel model(sizes, format, random);
  Memory<Element> memory(sizes);
  const int length = 2 * sizes.block_size - 1;
  const std::vector<Share> whole{{tokens(0, length, sizes), 0, {4, 1}},
                                 {tokens(5, 1, sizes), 0, {3}},
                                 {tokens(9, 12, sizes), 0, {0}}};
  const Outputs first = run(model, memory, whole, 1);
  check_outputs(first, sizes);
  for (int threads : {2, 3}) {
    Memory<Element> other(sizes);
    const Outputs again = run(model, other, whole, threads);
    CHECK(same_bits(first.hidden, again.hidden), "%d threads", threads);
    CHECK(same_bits(first.logits, again.logits), "%d threads", threads);
    CHECK(first.likeliest == again.likeliest, "%d threads", threads);
    CHECK(same_bits(memory.cache, other.cache), "%d threads", threads);
    Memory<Element> parts(sizes);
    run(model, parts, {{tokens(0, 10, sizes), 0, {4}}, {tokens(9, 11, sizes), 0, {0}}}, threads);
    const Outputs last = run(model, parts,
                             {{tokens(10, length - 10, sizes), 10, {4, 1}},
                              {tokens(5, 1, sizes), 0, {3}},
                              {tokens(20, 1, sizes), 11, {0}}},
                             threads);
    CHECK(same_bits(first.logits, last.logits), "in parts, %d threads", threads);
    CHECK(same_bits(memory.cache, parts.cache), "in parts, %d threads", threads);
  }
}

}  // namespace

int main() {
  CHECK(ts_prepare() == 0, "these kernels cannot be used here");
  Random random(3);
  const Sizes even{64, 32, 4, 2, 16, 16, 70, 16}, odd{38, 64, 3, 1, 48, 32, 33, 32};
  test<float>(even, Format::FLOAT32, random);
  test<bf16>(even, Format::BFLOAT16, random);
  test<float>(even, Format::INT8, random);
  test<bf16>(even, Format::INT4, random);
  test<float>(odd, Format::FLOAT32, random);
  test<bf16>(odd, Format::BFLOAT16, random);
  test<int8_t>(even, Format::FLOAT32, random);
  test<int8_t>(odd, Format::BFLOAT16, random);
}
