// Attention of a step's queries to the paged KV of their sequences.
//
// A KV block holds tiles of 16 positions (cpu_kernels/kv_order.py: "tiles16"): keys with positions in
// the lanes, values with dimensions in the lanes, each in words of 4 bytes. So neither scores nor
// outputs are ever summed across lanes, and one load serves up to MAX_QUERIES queries.
//
// A query's positions are taken in partitions of 128, each with a softmax of its own; partitions are
// folded into the answer from left to right (Flash-Decoding, arXiv:2311.01282). Whether one thread
// takes all partitions of a query or several share them, and whatever is computed beside it, the
// same numbers are added in the same order: a row's result is the same in prefill and decode, in any
// batch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vector.h"

namespace twostroke {

constexpr int TILE = 16;             // positions
constexpr int PARTITION_TILES = 8;
constexpr int PARTITION = TILE * PARTITION_TILES;
constexpr int MAX_QUERIES = 6;
constexpr int MAX_HEAD_DIM = 512;
constexpr float NONE = -INFINITY;    // the largest score of no position at all

struct AttentionShape {
  int heads, kv_heads, head_dim, block_size;
  float scale, softcap;  // softcap 0: none

  int group() const { return heads / kv_heads; }
};

// One layer of the cache.
struct KVLayer {
  char* keys;
  char* values;
};

// `num_queries` rows of the step, from `first_row`, after `num_computed` positions.
struct SequenceShare {
  int first_row, num_queries, num_computed;
  const int32_t* block_table;
};

// Block tables: [num_sequences, table_width].
inline std::vector<SequenceShare> sequence_shares(int num_sequences, const int32_t* query_lens,
                                                  const int32_t* num_computed,
                                                  const int32_t* block_tables, int table_width) {
  std::vector<SequenceShare> sequences;
  int first_row = 0;
  for (int i = 0; i < num_sequences; ++i) {
    sequences.push_back(
        {first_row, query_lens[i], num_computed[i], block_tables + (size_t)i * table_width});
    first_row += query_lens[i];
  }
  return sequences;
}

// take(sequence, row, position) for every row of the step in `rows`.
template <class Take>
inline void each_row(const std::vector<SequenceShare>& sequences, Range rows, Take take) {
  for (const SequenceShare& sequence : sequences) {
    const int first = std::max(rows.begin, sequence.first_row);
    const int end = std::min(rows.end, sequence.first_row + sequence.num_queries);
    for (int row = first; row < end; ++row)
      take(sequence, row, sequence.num_computed + row - sequence.first_row);
  }
}

// How one element type is held in words of 4 bytes.
template <class Element>
struct Words {
  static constexpr int WIDTH = 4 / sizeof(Element);

  static f32x16 dot(f32x16 sum, i32x16 tile, i32x16 word) {
    if constexpr (WIDTH == 1)
      return fma((f32x16)tile, (f32x16)word, sum);
    else
      return dot_bf16(sum, tile, word);
  }
  static Element from(float x) {
    if constexpr (WIDTH == 1)
      return x;
    else
      return narrow(x);
  }
};

template <class Element>
class PagedAttention {
 public:
  PagedAttention(const AttentionShape& shape, KVLayer layer) : shape_(shape), layer_(layer) {}

  // Writes one position's key and value, [kv_heads][head_dim] each.
  template <class Number>
  void store_kv(const SequenceShare& sequence, int position, const Number* key,
                const Number* value) const {
    constexpr int width = Words<Element>::WIDTH;
    const int dim = shape_.head_dim, lane = position % TILE;
    for (int head = 0; head < shape_.kv_heads; ++head, key += dim, value += dim) {
      const size_t tile = tile_offset(sequence.block_table, position / TILE, head);
      Element* keys = (Element*)(layer_.keys + tile);
      Element* values = (Element*)(layer_.values + tile) + (size_t)(lane / width) * dim * width;
      for (int d = 0; d < dim; d += LANES) {
        alignas(64) Element numbers[LANES];
        store(numbers, load(key + d));
        for (int i = 0; i < LANES; i += width)  // one word each
          std::memcpy(keys + (size_t)((d + i) / width * TILE + lane) * width, numbers + i, 4);
        store_apart<width>(values + d * width + lane % width, load(value + d));
      }
    }
  }

  // Some queries of one kv head: (row, head of the group) pairs [first, first + count), flat.
  struct Task {
    const SequenceShare* sequence;
    int kv_head, first, count;
    int begin, end;  // partitions
    int part;        // where partial results go: index of the first one; -1: the task is whole
  };

  struct Step {
    const Element* queries;  // [rows][heads][head_dim], scaled
    float* out;              // [rows][heads * head_dim]
    float* partials;         // [parts][MAX_QUERIES][head_dim + 2]
    int window;              // 0: none
  };

  size_t partial_size() const { return (size_t)MAX_QUERIES * (shape_.head_dim + 2); }

  // `next`: what this thread will run after it, if anything; its first keys are fetched ahead.
  void run(const Task& task, const Step& step, const Task* next = nullptr) const {
    switch (task.count) {
      case 1: return run<1>(task, step, next);
      case 2: return run<2>(task, step, next);
      case 3: return run<3>(task, step, next);
      case 4: return run<4>(task, step, next);
      case 5: return run<5>(task, step, next);
      default: return run<6>(task, step, next);
    }
  }

  // Folds the partial results of the queries of `task`, a task that was cut.
  void fold_parts(const Task& task, const Step& step, int query) const {
    const int dim = shape_.head_dim;
    Answer answer{out_of(task, step, query)};
    for (int part = task.part; part < task.part + task.end - task.begin; ++part) {
      const float* partial = step.partials + part * partial_size() + (size_t)query * (dim + 2);
      answer.fold(partial, partial[dim], partial[dim + 1], dim);
    }
    answer.finish(dim);
  }

 private:
  struct Answer {
    float* out;
    float peak = NONE;
    float total = 0;

    // Adds a partition: its outputs weighted by exp(score - part_peak), and those weights' sum.
    void fold(const float* part, float part_peak, float part_total, int dim) {
      if (part_total == 0 || std::isnan(total)) return;  // it sees none of it; no number comes back
      if (total == 0) {
        std::memcpy(out, part, sizeof(float) * dim);
        peak = part_peak;
        total = part_total;
        return;
      }
      const float highest = part_peak > peak ? part_peak : peak;
      const f32x16 factors = exp(f32x16{peak - highest, part_peak - highest});
      const f32x16 old_factor = set1(factors[0]), new_factor = set1(factors[1]);
      for (int d = 0; d < dim; d += LANES)
        store(out + d, fma(load(out + d), old_factor, load(part + d) * new_factor));
      total = total * factors[0] + part_total * factors[1];
      peak = highest;
    }

    void finish(int dim) const {
      const f32x16 factor = set1(1.0f / total);
      for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * factor);
    }
  };

  size_t tile_offset(const int32_t* block_table, int tile, int kv_head) const {
    const int per_block = shape_.block_size / TILE;
    const size_t head = (size_t)block_table[tile / per_block] * shape_.kv_heads + kv_head;
    return (head * per_block + tile % per_block) * TILE * shape_.head_dim * sizeof(Element);
  }

  float* out_of(const Task& task, const Step& step, int query) const {
    const int flat = task.first + query, group = shape_.group();
    const size_t row = task.sequence->first_row + flat / group;
    const int head = task.kv_head * group + flat % group;
    return step.out + (row * shape_.heads + head) * shape_.head_dim;
  }

  // Where the tiles of a partition begin, in keys and in values.
  struct Tiles {
    int count = 0;
    size_t offsets[PARTITION_TILES] = {};  // beyond `count` of the first block: for prefetching only
  };

  Tiles tiles_of(const Task& task, int partition, int last_position) const {
    Tiles tiles;
    const int first = partition * PARTITION_TILES;
    tiles.count = std::min(PARTITION_TILES, last_position / TILE + 1 - first);
    for (int i = 0; i < tiles.count; ++i)
      tiles.offsets[i] = tile_offset(task.sequence->block_table, first + i, task.kv_head);
    return tiles;
  }

  int last_position(const Task& task) const {
    return task.sequence->num_computed + (task.first + task.count - 1) / shape_.group();
  }

  template <int Q>
  void run(const Task& task, const Step& step, const Task* next_task) const {
    const int dim = shape_.head_dim;
    const int group = shape_.group();
    const Element* queries[Q];
    int positions[Q];
    Answer answers[Q];
    for (int q = 0; q < Q; ++q) {
      const int flat = task.first + q;
      const size_t row = task.sequence->first_row + flat / group;
      const int head = task.kv_head * group + flat % group;
      queries[q] = step.queries + (row * shape_.heads + head) * dim;
      positions[q] = task.sequence->num_computed + flat / group;
      answers[q].out = out_of(task, step, q);
    }
    const int last = last_position(task);
    alignas(64) float buffer[Q * MAX_HEAD_DIM];
    Tiles tiles = tiles_of(task, task.begin, last);
    for (int partition = task.begin; partition < task.end; ++partition) {
      const int first_position = partition * PARTITION;
      Tiles next_tiles;
      if (partition + 1 < task.end)
        next_tiles = tiles_of(task, partition + 1, last);
      else if (next_task)
        next_tiles = tiles_of(*next_task, next_task->begin, last_position(*next_task));
      alignas(64) float scores[Q][PARTITION];
      float peaks[Q], totals[Q];
      score<Q>(queries, tiles, next_tiles, scores);
      alignas(64) Element weights[Q][PARTITION];
      for (int q = 0; q < Q; ++q)
        softmax(scores[q], tiles.count, positions[q] - first_position, step.window, weights[q],
                peaks[q], totals[q]);
      weigh<Q>(weights, tiles, next_tiles, buffer);
      tiles = next_tiles;
      for (int q = 0; q < Q; ++q) {
        const float* part = buffer + (size_t)q * dim;
        if (task.part < 0) {
          answers[q].fold(part, peaks[q], totals[q], dim);
        } else {
          float* partial = step.partials + (task.part + partition - task.begin) * partial_size() +
                           (size_t)q * (dim + 2);
          std::memcpy(partial, part, sizeof(float) * dim);
          partial[dim] = peaks[q];
          partial[dim + 1] = totals[q];
        }
      }
    }
    if (task.part < 0)
      for (Answer& answer : answers) answer.finish(dim);
  }

  // Dot products of Q queries with the keys of the tiles. Blocks lie anywhere, so no hardware
  // foresees them: the next partition is fetched while this one is read, keys with keys and values
  // with values.
  template <int Q>
  void score(const Element* const* queries, const Tiles& tiles, const Tiles& next,
             float (*scores)[PARTITION]) const {
    constexpr int TOGETHER = Q <= 3 ? 4 : 2;  // 12 sums hide the latency of an addition
    int tile = 0;
    for (; tile + TOGETHER <= tiles.count; tile += TOGETHER)
      score_tiles<Q, TOGETHER>(queries, tiles, next, tile, scores);
    for (; tile < tiles.count; ++tile) score_tiles<Q, 1>(queries, tiles, next, tile, scores);
  }

  template <int Q, int TILES>
  void score_tiles(const Element* const* queries, const Tiles& tiles, const Tiles& next, int first,
                   float (*scores)[PARTITION]) const {
    const int words = shape_.head_dim / Words<Element>::WIDTH;
    f32x16 sums[Q][TILES] = {};
    for (int word = 0; word < words; ++word) {
      i32x16 keys[TILES];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; ++t) {
        const size_t place = (size_t)word * 64;
        keys[t] = load_bits(layer_.keys + tiles.offsets[first + t] + place);
        __builtin_prefetch(layer_.keys + next.offsets[first + t] + place);
      }
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const i32x16 query = broadcast_bits((const char*)queries[q] + word * 4);
#pragma GCC unroll 4
        for (int t = 0; t < TILES; ++t) sums[q][t] = Words<Element>::dot(sums[q][t], keys[t], query);
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int t = 0; t < TILES; ++t) store(scores[q] + (first + t) * TILE, sums[q][t]);
  }

  // Of positions (last - window, last], counted from the partition's first one.
  void softmax(float* scores, int num_tiles, int last, int window, Element* weights, float& peak,
               float& total) const {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool masked = last < num_tiles * TILE - 1 || (window && last - window >= 0);
    f32x16 peaks = set1(NONE);
    for (int tile = 0; tile < num_tiles; ++tile) {
      f32x16 x = load(scores + tile * TILE);
      if (shape_.softcap != 0) x = cap(x);
      if (masked) {
        const i32x16 position = lane + set1(tile * TILE);
        x = position > set1(last) ? set1(NONE) : x;
        if (window) x = position <= set1(last - window) ? set1(NONE) : x;
      }
      store(scores + tile * TILE, x);
      peaks = max(x, peaks);
    }
    peak = largest(peaks);
    const f32x16 shift = set1(peak == NONE ? 0.0f : peak);
    f32x16 totals = {};
    for (int tile = 0; tile < num_tiles; ++tile) {
      const f32x16 weight = exp(load(scores + tile * TILE) - shift);
      totals += weight;
      store(weights + tile * TILE, weight);
    }
    total = sum(totals);
  }

  // cap * tanh(x / cap); tanh(y) = 1 - 2 / (exp(2 y) + 1), whose exp must not overflow
  f32x16 cap(f32x16 x) const {
    const f32x16 limit = set1(40.0f);
    f32x16 y = x * set1(2.0f / shape_.softcap);
    y = y > limit ? limit : y;
    return set1(shape_.softcap) * (set1(1.0f) - set1(2.0f) / (exp(y) + set1(1.0f)));
  }

  // [Q][head_dim]: the values of the tiles, weighted.
  template <int Q>
  void weigh(const Element (*weights)[PARTITION], const Tiles& tiles, const Tiles& next,
             float* out) const {
    int d = 0;
    for (; d + 4 * LANES <= shape_.head_dim; d += 4 * LANES)
      weigh_dims<Q, 4>(weights, tiles, next, d, out + d);
    for (; d < shape_.head_dim; d += LANES) weigh_dims<Q, 1>(weights, tiles, next, d, out + d);
  }

  template <int Q, int VECTORS>
  void weigh_dims(const Element (*weights)[PARTITION], const Tiles& tiles, const Tiles& next,
                  int first_dim, float* out) const {
    constexpr int words = TILE / Words<Element>::WIDTH;
    const size_t stride = (size_t)shape_.head_dim * 4;
    f32x16 sums[Q][VECTORS] = {};
    for (int tile = 0; tile < tiles.count; ++tile) {
      size_t offset = tiles.offsets[tile] + (size_t)first_dim * 4;
      const size_t ahead = next.offsets[tile] - tiles.offsets[tile];
      const int first_word = tile * words;
      for (int word = 0; word < words; ++word, offset += stride) {
        i32x16 dims[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          dims[v] = load_bits(layer_.values + offset + 64 * v);
          __builtin_prefetch(layer_.values + offset + ahead + 64 * v);
        }
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
          const i32x16 weight =
              broadcast_bits((const char*)weights[q] + (first_word + word) * 4);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v)
            sums[q][v] = Words<Element>::dot(sums[q][v], dims[v], weight);
        }
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < VECTORS; ++v)
        store(out + (size_t)q * shape_.head_dim + v * LANES, sums[q][v]);
  }

  const AttentionShape shape_;
  const KVLayer layer_;
};

// The tasks of a step: the same for all layers with one window. Costliest first, so that threads
// which take one after another end together.
template <class Element>
class AttentionPlan {
 public:
  using Task = typename PagedAttention<Element>::Task;

  AttentionPlan(const AttentionShape& shape, const std::vector<SequenceShare>& sequences,
                int window, int num_threads)
      : window_(window) {
    int64_t cost = 0;
    for (const SequenceShare& sequence : sequences) add_whole(shape, sequence, cost);
    // With few tasks a thread would wait for another's: cut them, unless they are small.
    constexpr int TASKS_PER_THREAD = 8;
    const int wanted = num_threads * TASKS_PER_THREAD;
    if (num_threads > 1 && (int)tasks_.size() < wanted) cut((int)std::max<int64_t>(1, cost / wanted));
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
      return a.end - a.begin > b.end - b.begin;
    });
  }

  int window() const { return window_; }
  int num_parts() const { return num_parts_; }
  bool is_cut() const { return !whole_.empty(); }

  // One member's share of the work of a layer; `next` counts the layer's tasks.
  void attend(const PagedAttention<Element>& attention,
              const typename PagedAttention<Element>::Step& step, std::atomic<int>& next,
              const Member& member) const {
    const int count = (int)tasks_.size();
    for (int i = next++, after; i < count; i = after) {
      after = next++;
      attention.run(tasks_[i], step, after < count ? &tasks_[after] : nullptr);
    }
    if (!is_cut()) return;
    member.wait();
    const Range queries = member.share(num_queries_);
    int query = 0;
    for (const Task& task : whole_)
      for (int q = 0; q < task.count; ++q, ++query)
        if (query >= queries.begin && query < queries.end)
          attention.fold_parts(task, step, q);
  }

 private:
  void add_whole(const AttentionShape& shape, const SequenceShare& sequence, int64_t& cost) {
    const int num_queries = sequence.num_queries * shape.group();
    const int num_blocks = (num_queries + MAX_QUERIES - 1) / MAX_QUERIES;
    for (int block = 0; block < num_blocks; ++block) {
      const int first = (int)((int64_t)num_queries * block / num_blocks);
      const int end = (int)((int64_t)num_queries * (block + 1) / num_blocks);
      const int last_position = sequence.num_computed + (end - 1) / shape.group();
      const int first_position = sequence.num_computed + first / shape.group();
      const int from = window_ ? std::max(0, first_position - window_ + 1) / PARTITION : 0;
      for (int head = 0; head < shape.kv_heads; ++head) {
        tasks_.push_back({&sequence, head, first, end - first, from, last_position / PARTITION + 1, -1});
        cost += tasks_.back().end - from;
      }
    }
  }

  void cut(int size) {
    whole_.swap(tasks_);
    for (Task& task : whole_) {
      task.part = num_parts_;
      num_parts_ += task.end - task.begin;
      num_queries_ += task.count;
      for (int begin = task.begin; begin < task.end; begin += size) {
        Task piece = task;
        piece.begin = begin;
        piece.end = std::min(task.end, begin + size);
        piece.part = task.part + begin - task.begin;
        tasks_.push_back(piece);
      }
    }
  }

  int window_;
  int num_parts_ = 0, num_queries_ = 0;
  std::vector<Task> tasks_;
  std::vector<Task> whole_;  // before they were cut; empty if they were not
};

}  // namespace twostroke
