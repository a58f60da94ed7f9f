// Attention of a step's queries to the paged KV of their sequences.
//
// A KV block holds tiles of 16 positions (cpu_kernels/kv_order.py: "tiles16"): keys with positions
// in the lanes, values with dimensions in the lanes, each in words of 4 bytes (kv_words.h). So
// neither scores nor outputs are ever summed across lanes, and one load serves up to MAX_QUERIES
// queries.
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

#include "kv_words.h"
#include "threads.h"

namespace twostroke {

constexpr int MAX_QUERIES = 6;
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

template <class Element>
class PagedAttention {
 public:
  PagedAttention(const AttentionShape& shape, KVLayer layer) : shape_(shape), layer_(layer) {}

  // Of a position's key, or value, of one head; its scale included.
  static size_t row_bytes(int head_dim) {
    return head_dim * sizeof(Element) + (Held::IS_SCALED ? sizeof(float) : 0);
  }

  // Writes one position's key and value, [kv_heads][head_dim] each.
  template <class Number>
  void store_kv(const SequenceShare& sequence, int position, const Number* key,
                const Number* value) const {
    const int dim = shape_.head_dim, lane = position % TILE;
    for (int head = 0; head < shape_.kv_heads; ++head, key += dim, value += dim) {
      const size_t tile = tile_offset(sequence.block_table, position / TILE, head);
      store_key(layer_.keys + tile, lane, key);
      store_value(layer_.values + tile, lane, value);
    }
  }

  // Of one head's query.
  size_t query_bytes() const { return Held::query_bytes(shape_.head_dim); }

  // A row's queries, [heads][head_dim], as they are multiplied with keys.
  template <class Number>
  void put_queries(const Number* x, char* out) const {
    for (int head = 0; head < shape_.heads; ++head)
      Held::put_query(x + (size_t)head * shape_.head_dim, shape_.scale, shape_.head_dim,
                      out + head * query_bytes());
  }

  // Some queries of one kv head: (row, head of the group) pairs [first, first + count), flat.
  struct Task {
    const SequenceShare* sequence;
    int kv_head, first, count;
    int begin, end;  // partitions
    int part;        // where partial results go: index of the first one; -1: the task is whole
  };

  struct Step {
    const char* queries;  // [rows][heads][query_bytes]
    float* out;           // [rows][heads * head_dim]
    float* partials;      // [parts][MAX_QUERIES][head_dim + 2]
    int window;           // 0: none
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
  using Held = Words<Element>;
  using Sum = typename Held::Sum;
  static constexpr int PLANES = Held::PLANES;

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
    return (head * per_block + tile % per_block) * TILE * row_bytes(shape_.head_dim);
  }

  // `tile`: of keys, or of values. Of IS_SCALED types only.
  float* scales_of(char* tile) const {
    return (float*)(tile + (size_t)TILE * shape_.head_dim * sizeof(Element));
  }

  template <class Number>
  float put_scale(char* tile, int lane, const Number* row) const {
    if constexpr (Held::IS_SCALED)
      return scales_of(tile)[lane] = Held::row_scale(row, shape_.head_dim);
    else
      return 1;
  }

  template <class Number>
  void store_key(char* tile, int lane, const Number* key) const {
    constexpr int width = Held::WIDTH;
    const float scale = put_scale(tile, lane, key);
    for (int d = 0; d < shape_.head_dim; d += LANES) {
      alignas(64) Element numbers[LANES];
      store(numbers, load(key + d) / set1(scale));
      for (int i = 0; i < LANES; i += width)  // one word each
        std::memcpy(tile + (size_t)((d + i) / width * TILE + lane) * 4, numbers + i, 4);
    }
  }

  template <class Number>
  void store_value(char* tile, int lane, const Number* value) const {
    constexpr int width = Held::WIDTH;
    const float scale = put_scale(tile, lane, value);
    Element* numbers = (Element*)tile + (size_t)(lane / width) * shape_.head_dim * width;
    for (int d = 0; d < shape_.head_dim; d += LANES)
      store_apart<width>(numbers + d * width + lane % width, load(value + d) / set1(scale));
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
    const char* queries[Q];
    int positions[Q];
    Answer answers[Q];
    for (int q = 0; q < Q; ++q) {
      const int flat = task.first + q;
      const size_t row = task.sequence->first_row + flat / group;
      const int head = task.kv_head * group + flat % group;
      queries[q] = step.queries + (row * shape_.heads + head) * query_bytes();
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
      alignas(64) Weights weights[Q];
      score<Q>(queries, tiles, next_tiles, scores);
      for (int q = 0; q < Q; ++q)
        softmax(scores[q], tiles, positions[q] - first_position, step.window, weights[q]);
      weigh<Q>(weights, tiles, next_tiles, buffer);
      tiles = next_tiles;
      for (int q = 0; q < Q; ++q) {
        const float* part = buffer + (size_t)q * dim;
        if (task.part < 0) {
          answers[q].fold(part, weights[q].peak, weights[q].total, dim);
        } else {
          float* partial = step.partials + (task.part + partition - task.begin) * partial_size() +
                           (size_t)q * (dim + 2);
          std::memcpy(partial, part, sizeof(float) * dim);
          partial[dim] = weights[q].peak;
          partial[dim + 1] = weights[q].total;
        }
      }
    }
    if (task.part < 0)
      for (Answer& answer : answers) answer.finish(dim);
  }

  // A query's weights in one partition.
  struct Weights {
    char planes[PLANES][PARTITION * sizeof(Element)];
    float size;  // what 1 is worth, of IS_SCALED types
    float peak;  // the largest score
    float total;
  };

  // Dot products of Q queries with the keys of the tiles. Blocks lie anywhere, so no hardware
  // foresees them: the next partition is fetched while this one is read, keys with keys and values
  // with values.
  template <int Q>
  void score(const char* const* queries, const Tiles& tiles, const Tiles& next,
             float (*scores)[PARTITION]) const {
    constexpr int TOGETHER = Q <= 3 ? 4 : 2;  // 12 sums hide the latency of an addition
    int tile = 0;
    for (; tile + TOGETHER <= tiles.count; tile += TOGETHER)
      score_tiles<Q, TOGETHER>(queries, tiles, next, tile, scores);
    for (; tile < tiles.count; ++tile) score_tiles<Q, 1>(queries, tiles, next, tile, scores);
  }

  template <int Q, int TILES>
  void score_tiles(const char* const* queries, const Tiles& tiles, const Tiles& next, int first,
                   float (*scores)[PARTITION]) const {
    const int words = shape_.head_dim / Held::WIDTH;
    Sum sums[Q][PLANES][TILES] = {};
    for (int word = 0; word < words; ++word) {
      i32x16 keys[TILES];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; ++t) {
        const size_t place = (size_t)word * 64;
        keys[t] = Held::key(load_bits(layer_.keys + tiles.offsets[first + t] + place));
        __builtin_prefetch(layer_.keys + next.offsets[first + t] + place);
      }
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 2
        for (int plane = 0; plane < PLANES; ++plane) {
          const i32x16 query = broadcast_bits(queries[q] + (size_t)(plane * words + word) * 4);
#pragma GCC unroll 4
          for (int t = 0; t < TILES; ++t)
            sums[q][plane][t] = Held::dot_key(sums[q][plane][t], keys[t], query);
        }
      }
    }
    for (int t = 0; t < TILES; ++t) {
      if constexpr (Held::IS_SCALED) {
        const f32x16 scales = load(scales_of(layer_.keys + tiles.offsets[first + t]));
        __builtin_prefetch(scales_of(layer_.keys + next.offsets[first + t]));
        __builtin_prefetch(scales_of(layer_.values + next.offsets[first + t]));
        for (int q = 0; q < Q; ++q)
          store(scores[q] + (first + t) * TILE,
                Held::score(sums[q][0][t], sums[q][1][t], queries[q], shape_.head_dim, scales));
      } else {
        for (int q = 0; q < Q; ++q) store(scores[q] + (first + t) * TILE, sums[q][0][t]);
      }
    }
  }

  // Of positions (last - window, last], counted from the partition's first one. Of the others
  // neither the score nor the scale need be a number. Spoils `scores`.
  void softmax(float* scores, const Tiles& tiles, int last, int window, Weights& out) const {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool masked = last < tiles.count * TILE - 1 || (window && last - window >= 0);
    f32x16 peaks = set1(NONE);
    for (int tile = 0; tile < tiles.count; ++tile) {
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
    out.peak = largest(peaks);
    const f32x16 shift = set1(out.peak == NONE ? 0.0f : out.peak);
    f32x16 totals = {};
    Peak scaled_peak;
    for (int tile = 0; tile < tiles.count; ++tile) {
      const f32x16 x = load(scores + tile * TILE), weight = exp(x - shift);
      totals += weight;
      if constexpr (Held::IS_SCALED) {
        const f32x16 scales = load(scales_of(layer_.values + tiles.offsets[tile]));
        const f32x16 scaled = x == set1(NONE) ? f32x16{} : weight * scales;
        store(scores + tile * TILE, scaled);
        scaled_peak.add(scaled);
      } else {
        store((Element*)out.planes[0] + tile * TILE, weight);
      }
    }
    out.total = sum(totals);
    if constexpr (Held::IS_SCALED)
      out.size = Held::put_weights(scores, scaled_peak.value(), tiles.count, out.planes[0]);
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
  void weigh(const Weights* weights, const Tiles& tiles, const Tiles& next, float* out) const {
    constexpr int VECTORS = Q * PLANES <= MAX_QUERIES ? 4 : 2;  // no more sums than registers
    int d = 0;
    for (; d + VECTORS * LANES <= shape_.head_dim; d += VECTORS * LANES)
      weigh_dims<Q, VECTORS>(weights, tiles, next, d, out + d);
    for (; d < shape_.head_dim; d += LANES) weigh_dims<Q, 1>(weights, tiles, next, d, out + d);
  }

  template <int Q, int VECTORS>
  void weigh_dims(const Weights* weights, const Tiles& tiles, const Tiles& next, int first_dim,
                  float* out) const {
    constexpr int words = TILE / Held::WIDTH;
    const size_t stride = (size_t)shape_.head_dim * 4;
    Sum sums[Q][PLANES][VECTORS] = {};
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
#pragma GCC unroll 2
          for (int plane = 0; plane < PLANES; ++plane) {
            const i32x16 weight =
                broadcast_bits(weights[q].planes[plane] + (first_word + word) * 4);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
              sums[q][plane][v] = Held::dot_value(sums[q][plane][v], dims[v], weight);
          }
        }
      }
    }
    for (int q = 0; q < Q; ++q) {
      for (int v = 0; v < VECTORS; ++v) {
        float* to = out + (size_t)q * shape_.head_dim + v * LANES;
        if constexpr (Held::IS_SCALED)
          store(to, Held::weighed(sums[q][0][v], sums[q][1][v], weights[q].size));
        else
          store(to, sums[q][0][v]);
      }
    }
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
