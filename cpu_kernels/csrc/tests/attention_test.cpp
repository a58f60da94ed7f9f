// Attention over a cache in tile order against a plain loop in double, for odd shapes, in buffers
// of exactly the promised size and full of what must not matter; cut among threads or not, in one
// step or in several, the same bits.
#include "../attention.h"
#include "check.h"

using namespace twostroke;

namespace {

struct Shape {
  int group, kv_heads, head_dim, block_size, window;
  float softcap;
};

// Sequences with keys and values at random; the queries are the last positions of each.
template <class Element>
class Case {
 public:
  Case(const Shape& shape, const std::vector<int>& lengths, Random& random)
      : shape_(shape), lengths_(lengths) {
    std::vector<int32_t> blocks;
    for (int length : lengths)
      for (int i = 0; i < length; i += shape.block_size) blocks.push_back((int32_t)blocks.size());
    const size_t row = (size_t)shape.kv_heads * shape.head_dim;
    cache_.resize(2 * blocks.size() * shape.block_size * shape.kv_heads *
                  PagedAttention<Element>::row_bytes(shape.head_dim));
    if (sizeof(Element) == 1)  // other types need 0 where they have weight 0
      for (char& byte : cache_) byte = (char)(random.below(2) ? 0xff : 0x7f);  // NaN as scales, mostly
    for (int length : lengths) {
      std::vector<int32_t> table;
      for (int i = 0; i < length; i += shape.block_size) {
        const int taken = random.below((int)blocks.size());
        table.push_back(blocks[taken]);
        blocks.erase(blocks.begin() + taken);
      }
      tables_.push_back(table);
      keys_.push_back(rounded(random.normals(length * row)));
      values_.push_back(rounded(random.normals(length * row)));
      queries_.push_back(random.normals(length * row * shape.group, 0.5f));
    }
    for (size_t i = 0; i < lengths.size(); ++i)
      for (int position = 0; position < lengths[i]; ++position)
        attention().store_kv({0, 0, 0, tables_[i].data()}, position, &keys_[i][position * row],
                             &values_[i][position * row]);
  }

  // Answers of the last `counts[i]` positions of each sequence, one after another.
  std::vector<float> run(const std::vector<int>& counts, int num_threads) const {
    std::vector<SequenceShare> sequences;
    std::vector<float> queries;
    int num_rows = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      sequences.push_back({num_rows, counts[i], lengths_[i] - counts[i], tables_[i].data()});
      num_rows += counts[i];
      queries.insert(queries.end(), queries_[i].end() - counts[i] * row_size(), queries_[i].end());
    }
    const PagedAttention<Element> paged = attention();
    const size_t stride = shape_.group * shape_.kv_heads * paged.query_bytes();
    std::vector<char> prepared(num_rows * stride);
    for (int row = 0; row < num_rows; ++row)
      paged.put_queries(&queries[row * row_size()], &prepared[row * stride]);
    const AttentionPlan<Element> plan(attention_shape(), sequences, shape_.window, num_threads);
    std::vector<float> out(num_rows * row_size());
    std::vector<float> partials(plan.num_parts() * paged.partial_size());
    std::atomic<int> next{0};
    run_together(num_threads, [&](const Member& member) {
      plan.attend(paged, {prepared.data(), out.data(), partials.data(), shape_.window}, next,
                  member);
    });
    was_cut_ = plan.is_cut();
    return out;
  }

  void equals_plain_loop(const std::vector<int>& counts) const {
    const std::vector<float> out = run(counts, 1);
    const float* answer = out.data();
    for (size_t i = 0; i < counts.size(); ++i)
      for (int position = lengths_[i] - counts[i]; position < lengths_[i]; ++position)
        for (int head = 0; head < shape_.group * shape_.kv_heads; ++head, answer += shape_.head_dim)
          check_answer(answer, (int)i, position, head);
  }

  void same_however_it_is_run(const std::vector<int>& counts) const {
    const std::vector<float> out = run(counts, 1);
    CHECK(!was_cut_, "one thread needs no pieces");
    for (int threads : {2, 3}) CHECK(same_bits(out, run(counts, threads)), "%d threads", threads);
    const std::vector<int> fewer(counts.size(), 1);
    const std::vector<float> last = run(fewer, 3);
    size_t end = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      end += counts[i] * row_size();
      const bool same = std::memcmp(&last[i * row_size()], &out[end - row_size()],
                                    row_size() * sizeof(float)) == 0;
      CHECK(same, "sequence %zu of %d positions", i, lengths_[i]);
    }
  }

  bool was_cut() const { return was_cut_; }

 private:
  // As the cache gives them back.
  std::vector<float> rounded(std::vector<float> numbers) const {
    for (size_t row = 0; row < numbers.size(); row += shape_.head_dim) {
      float scale = 0;
      for (int d = 0; d < shape_.head_dim; ++d)
        scale = std::max(scale, std::fabs(numbers[row + d]) / 127);
      for (int d = 0; d < shape_.head_dim; ++d) {
        float& number = numbers[row + d];
        if (sizeof(Element) == 1) number = std::nearbyint(number / scale) * scale;
        if (sizeof(Element) == 2) number = widen(narrow(number));
      }
    }
    return numbers;
  }
  size_t row_size() const { return (size_t)shape_.group * shape_.kv_heads * shape_.head_dim; }
  AttentionShape attention_shape() const {
    return {shape_.group * shape_.kv_heads, shape_.kv_heads, shape_.head_dim, shape_.block_size,
            1.0f, shape_.softcap};
  }
  PagedAttention<Element> attention() const {
    char* keys = const_cast<char*>(cache_.data());
    return {attention_shape(), {keys, keys + cache_.size() / 2}};
  }

  void check_answer(const float* answer, int sequence, int position, int head) const {
    const int dim = shape_.head_dim, kv_head = head / shape_.group;
    const int first = shape_.window ? std::max(0, position - shape_.window + 1) : 0;
    const size_t row = (size_t)shape_.kv_heads * dim;
    const float* query = &queries_[sequence][position * row_size() + (size_t)head * dim];
    std::vector<double> expected(dim);
    double total = 0;
    for (int seen = first; seen <= position; ++seen) {
      const size_t at = seen * row + (size_t)kv_head * dim;
      double score = 0;
      for (int d = 0; d < dim; ++d)
        score += (sizeof(Element) == 2 ? widen(narrow(query[d])) : query[d]) *
                 (double)keys_[sequence][at + d];
      if (shape_.softcap != 0) score = shape_.softcap * std::tanh(score / shape_.softcap);
      const double weight = std::exp(score);
      total += weight;
      for (int d = 0; d < dim; ++d) expected[d] += weight * values_[sequence][at + d];
    }
    const double limit = sizeof(Element) == 2 ? 0.02 : sizeof(Element) == 1 ? 2e-3 : 2e-5;
    for (int d = 0; d < dim; ++d)
      CHECK(std::fabs(answer[d] - expected[d] / total) <= limit,
            "sequence %d, position %d, head %d, dimension %d: %g, not %g", sequence, position, head,
            d, answer[d], expected[d] / total);
  }

  const Shape shape_;
  const std::vector<int> lengths_;
  std::vector<char> cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<float>> keys_, values_, queries_;
  mutable bool was_cut_ = false;
};

// The largest query and key that there are, over the longest head: the integers just fit.
void test_largest_sums() {
  constexpr int dim = MAX_HEAD_DIM;
  const std::vector<float> ones(dim, 1.0f), minus_ones(dim, -1.0f);
  const int32_t table[] = {0};
  std::vector<char> cache(2 * TILE * PagedAttention<int8_t>::row_bytes(dim));
  const AttentionShape shape{1, 1, dim, TILE, 1.0f, 0};
  const PagedAttention<int8_t> attention(shape, {cache.data(), cache.data() + cache.size() / 2});
  const std::vector<SequenceShare> sequences{{0, 1, 1, table}};
  attention.store_kv(sequences[0], 0, ones.data(), ones.data());
  attention.store_kv(sequences[0], 1, minus_ones.data(), minus_ones.data());
  const AttentionPlan<int8_t> plan(shape, sequences, 0, 1);
  for (const float sign : {1.0f, -1.0f}) {
    const std::vector<float> query(dim, sign);
    std::vector<char> prepared(attention.query_bytes());
    attention.put_queries(query.data(), prepared.data());
    std::vector<float> out(dim);
    std::atomic<int> next{0};
    run_together(1, [&](const Member& member) {
      plan.attend(attention, {prepared.data(), out.data(), nullptr, 0}, next, member);
    });
    // exp(-1024) is 0: the position of the query's own sign takes all.
    for (float number : out) CHECK(std::fabs(number - sign) < 1e-6, "%g, not %g", number, sign);
  }
}

template <class Element>
void test(Random& random) {
  bool was_cut = false;
  for (const Shape& shape : {Shape{3, 2, 64, 16, 0, 0}, {1, 3, 16, 32, 9, 0}, {6, 1, 48, 16, 70, 2},
                             {7, 1, 80, 16, 0, 5}, {4, 1, 32, 48, 1, 0}, {2, 1, 512, 16, 0, 0}}) {
    const Case<Element> some(shape, {1, 15, 16, 17, 63, 64, 65, 200}, random);
    const std::vector<int> counts{1, 2, 16, 3, 1, 7, 1, 13};
    some.equals_plain_loop(counts);
    some.same_however_it_is_run(counts);
    const Case<Element> one(shape, {300}, random);
    one.equals_plain_loop({4});
    one.same_however_it_is_run({4});
    was_cut |= one.was_cut();
  }
  CHECK(was_cut, "three threads share one long sequence");
}

}  // namespace

int main() {
  Random random(2);
  test<float>(random);
  test<bf16>(random);
  test<int8_t>(random);
  test_largest_sums();
}
