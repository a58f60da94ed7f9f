// A run of decoder layers of Llama's shape, from token ids to logits, in one call.
//
// Threads go through the layers side by side and meet at barriers: rows are shared out for what is
// done to rows (norms, rounding, rotation), panels for products, tasks for attention. Everything
// between two products is float32.
#pragma once

#include <cmath>
#include <limits>
#include <memory>

#include "attention.h"
#include "matmul.h"
#include "scratch.h"
#include "threads.h"

namespace twostroke {

struct Layer {
  Weight qkv, output, gate_up, down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // null: none
  const float *input_norm, *post_attention_norm;
  const float *query_norm, *key_norm;  // [head_dim]; null: none
  int window;                          // 0: none
  int rotates;
};

struct Model {
  int hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rotary_dim, num_layers,
      vocab_size;
  float norm_eps, attention_scale, attention_softcap, rotation_factor;
  const float* inverse_frequencies;  // [rotary_dim / 2]
  const Layer* layers;
  Weight embedding, head;
  const float* final_norm;
};

struct Cache {
  char* data;  // [num_layers, 2, num_blocks, num_kv_heads, block_size, row], tiles16
  int num_blocks, block_size;
  KVType type;
};

struct StepInputs {
  int num_tokens;
  const int64_t* token_ids;
  int num_sequences;
  const int32_t* query_lens;
  const int32_t* num_computed;
  const int32_t* block_tables;  // [num_sequences, table_width]
  int table_width;
  int num_logits;
  const int32_t* logits_rows;
};

struct StepOutputs {
  float* hidden;       // [num_tokens, hidden_size], not normed
  float* logits;       // [num_logits, vocab_size]
  int64_t* likeliest;  // [num_logits]: the lowest id of the largest logit; -1 where that is not
                       // finite, or one of them is NaN
  uint8_t* finite;     // [num_sequences]: whether the last row of hidden is
};

// Root mean square norm (arXiv:1910.07467). `size` need not be a multiple of 16.
inline void rms_norm(const float* x, const float* weight, int size, float eps, float* out) {
  f32x16 squares = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / (float)size + eps);
  for (i = 0; i + LANES <= size; i += LANES)
    store(out + i, load(x + i) * set1(factor) * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// Pairs (i, i + rotary_dim / 2) of each head (arXiv:2104.09864). cos, sin: [rotary_dim / 2].
inline void rotate(float* head, const float* cos, const float* sin, int half_dim) {
  int i = 0;
  for (; i + LANES <= half_dim; i += LANES) {
    const f32x16 a = load(head + i), b = load(head + half_dim + i);
    const f32x16 c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half_dim + i, fma(a, s, b * c));
  }
  for (; i < half_dim; ++i) {
    const float a = head[i], b = head[half_dim + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half_dim + i] = a * sin[i] + b * cos[i];
  }
}

inline f32x16 silu(f32x16 x) {
  const f32x16 lowest = set1(-88.0f);  // exp knows no number above 88
  return x / (set1(1.0f) + exp(f32x16{} - (x < lowest ? lowest : x)));
}

// Output `index` of every input: a row of the matrix, as an embedding wants it.
inline void unpack_row(const Weight& weight, int64_t index, float* out) {
  const int panel = (int)(index / PANEL), lane = (int)(index % PANEL);
  const char* words = weight.panel(panel) + lane * 4;
  const size_t scales = weight.group_index(panel) + lane;
  for (int k = 0; k < weight.k; ++k) {
    const size_t group = scales + (size_t)(k / GROUP) * PANEL;
    switch (weight.format) {
      case Format::FLOAT32: std::memcpy(out + k, words + (size_t)k * 128, 4); break;
      case Format::BFLOAT16: {
        bf16 value;
        std::memcpy(&value, words + (size_t)(k / 2) * 128 + k % 2 * 2, 2);
        out[k] = widen(value);
        break;
      }
      case Format::INT8: {
        const int code = (uint8_t)words[(size_t)(k / 4) * 128 + k % 4] - 128;
        out[k] = widen_half(weight.scales[group]) * (float)code;
        break;
      }
      case Format::INT4: {
        const int within = k % GROUP % (GROUP / 2);
        const int byte = (uint8_t)words[(size_t)(k / GROUP * 4 + within / 4) * 128 + within % 4];
        const int code = k % GROUP < GROUP / 2 ? byte & 15 : byte >> 4;
        out[k] = widen_half(weight.scales[group]) * (float)code + widen_half(weight.minimums[group]);
        break;
      }
    }
  }
}

class Stage {
 public:
  explicit Stage(const Model& model) : model_(model), layers_(model.layers, model.layers + model.num_layers) {}

  void run(const Cache& cache, const StepInputs& inputs, const StepOutputs& outputs,
           int num_threads) {
    with_element(cache.type, [&](auto element) {
      Run<decltype(element)>(*this, cache, inputs, outputs, num_threads).run();
    });
  }

 private:
  template <class Element>
  class Run {
   public:
    Run(Stage& stage, const Cache& cache, const StepInputs& inputs, const StepOutputs& outputs,
        int num_threads)
        : model_(stage.model_), layers_(stage.layers_), cache_(cache), inputs_(inputs),
          outputs_(outputs), num_threads_(num_threads),
          shape_{model_.num_heads, model_.num_kv_heads, model_.head_dim, cache.block_size,
                 model_.attention_scale, model_.attention_softcap},
          next_task_(model_.num_layers) {
      plan();
      stage.scratch_.fit([&] { allocate(stage.scratch_); });
    }

    void run() {
      run_together(num_threads_, [this](const Member& member) {
        embed(member);
        for (int layer = 0; layer < model_.num_layers; ++layer) {
          attention(layers_[layer], layer, member);
          mlp(layers_[layer], member);
        }
        check(member);
        if (inputs_.num_logits) logits(member);
      });
    }

   private:
    void plan() {
      sequences_ = sequence_shares(inputs_.num_sequences, inputs_.query_lens, inputs_.num_computed,
                                   inputs_.block_tables, inputs_.table_width);
      for (const Layer& layer : layers_) plan_of(layer.window);
    }

    const AttentionPlan<Element>& plan_of(int window) {
      for (const auto& plan : plans_)
        if (plan->window() == window) return *plan;
      plans_.push_back(std::make_unique<AttentionPlan<Element>>(shape_, sequences_, window, num_threads_));
      return *plans_.back();
    }

    void allocate(Scratch& scratch) {
      const size_t rows = inputs_.num_tokens;
      const int query_size = model_.num_heads * model_.head_dim;
      const int widest = std::max({model_.hidden_size, model_.intermediate_size, query_size});
      int parts = 0;
      for (const auto& plan : plans_) parts = std::max(parts, plan->num_parts());
      qkv_size_ = query_size + 2 * model_.num_kv_heads * model_.head_dim;
      prepared_ = take_rows(scratch, rows, widest);
      qkv_ = scratch.take<float>(rows * qkv_size_);
      queries_ = scratch.take<char>(rows * query_stride());
      attended_ = scratch.take<float>(rows * query_size);
      gated_ = scratch.take<float>(rows * model_.intermediate_size);
      cos_ = scratch.take<float>(rows * model_.rotary_dim / 2);
      sin_ = scratch.take<float>(rows * model_.rotary_dim / 2);
      partials_ = scratch.take<float>((size_t)parts * MAX_QUERIES * (model_.head_dim + 2));
      bests_ = scratch.take<Best>((size_t)num_threads_ * inputs_.num_logits);
      norms_ = scratch.take<float>(num_threads_ * norm_stride());
    }

    void embed(const Member& member) {
      const int half_dim = model_.rotary_dim / 2;
      const Range rows = member.share(inputs_.num_tokens);
      for (int row = rows.begin; row < rows.end; ++row)
        unpack_row(model_.embedding, inputs_.token_ids[row], hidden(row));
      each_row(sequences_, rows, [&](const SequenceShare&, int row, int position) {
        for (int i = 0; i < half_dim; ++i) {
          const float angle = (float)position * model_.inverse_frequencies[i];
          cos_[(size_t)row * half_dim + i] = std::cos(angle) * model_.rotation_factor;
          sin_[(size_t)row * half_dim + i] = std::sin(angle) * model_.rotation_factor;
        }
      });
      // No barrier: whoever embeds a row also norms it.
    }

    void attention(const Layer& layer, int index, const Member& member) {
      const PagedAttention<Element> paged(shape_, kv_layer(index));
      norm_rows(layer.input_norm, layer.qkv, member);
      member.wait();
      product(layer.qkv, member, [&](int row, int first, f32x16 a, f32x16 b) {
        put(qkv_ + (size_t)row * qkv_size_, qkv_size_, layer.qkv_bias, first, a, b);
      });
      member.wait();
      rotate_and_store(layer, paged, member);
      member.wait();
      paged_attention(layer, paged, index, member);
      member.wait();
      prepare_rows(attended_, layer.output, member);
      member.wait();
      add_product(layer.output, layer.output_bias, member);
      member.wait();
    }

    void mlp(const Layer& layer, const Member& member) {
      norm_rows(layer.post_attention_norm, layer.gate_up, member);
      member.wait();
      gated_product(layer, member);
      member.wait();
      prepare_rows(gated_, layer.down, member);
      member.wait();
      add_product(layer.down, layer.down_bias, member);
      member.wait();
    }

    void check(const Member& member) {
      const Range mine = member.share((int)sequences_.size());
      for (int i = mine.begin; i < mine.end; ++i) {
        const float* last = hidden(sequences_[i].first_row + sequences_[i].num_queries - 1);
        float spoiled = 0;
        for (int k = 0; k < model_.hidden_size; ++k) spoiled += last[k] * 0.0f;
        outputs_.finite[i] = spoiled == 0;
      }
    }

    void logits(const Member& member) {
      float* normed = norms_ + (size_t)member.index * norm_stride();
      const Range some = member.share(inputs_.num_logits);
      const Rows rows = rows_for(model_.head, prepared_);
      for (int i = some.begin; i < some.end; ++i) {
        rms_norm(hidden(inputs_.logits_rows[i]), model_.final_norm, model_.hidden_size,
                 model_.norm_eps, normed);
        prepare_row(model_.head.format, normed, model_.hidden_size, rows, i);
      }
      member.wait();
      const Range panels = member.share(model_.head.panels());
      matmul(model_.head, rows, inputs_.num_logits, panels.begin, panels.end,
             [&](int row, int panel, f32x16 a, f32x16 b) {
               put(outputs_.logits + (size_t)row * model_.vocab_size, model_.vocab_size, nullptr,
                   panel * PANEL, a, b);
             });
      Best* bests = bests_ + (size_t)member.index * inputs_.num_logits;
      for (int row = 0; row < inputs_.num_logits; ++row)
        bests[row] = best_of(outputs_.logits + (size_t)row * model_.vocab_size,
                             panels.begin * PANEL,
                             std::min(panels.end * PANEL, model_.vocab_size));
      member.wait();
      for (int row = some.begin; row < some.end; ++row) {
        Best best = bests_[row];
        for (int i = 1; i < member.count; ++i) {
          const Best& other = bests_[(size_t)i * inputs_.num_logits + row];
          if (std::isnan(other.logit) || other.logit > best.logit) best = other;
        }
        outputs_.likeliest[row] = std::isfinite(best.logit) ? best.index : -1;
      }
    }

    struct Best {
      float logit;  // NaN: one of them is NaN or +inf
      int index;
    };

    // The first of the largest of logits [begin, end): what one member has computed.
    static Best best_of(const float* logits, int begin, int end) {
      f32x16 peaks = set1(NONE), zeros = {};
      int i = begin;
      for (; i + LANES <= end; i += LANES) {
        const f32x16 x = load(logits + i);
        peaks = max(x, peaks);
        zeros += x * f32x16{};  // NaN from then on where x is not finite
      }
      float peak = largest(peaks), zero = 0;
      for (; i < end; ++i) {
        peak = logits[i] > peak ? logits[i] : peak;
        zero += logits[i] * 0.0f;
      }
      if (std::isnan(zero) || std::isnan(sum(zeros))) return best_with_infinities(logits, begin, end);
      for (i = begin; i + LANES <= end; i += LANES)
        if (const int lane = find(load(logits + i), peak); lane >= 0) return {peak, i + lane};
      while (i < end && logits[i] != peak) ++i;
      return {peak, i};
    }

    // -inf is no obstacle: such a token is only never taken.
    static Best best_with_infinities(const float* logits, int begin, int end) {
      Best best{NONE, begin};
      for (int i = begin; i < end; ++i) {
        if (std::isnan(logits[i]) || logits[i] == INFINITY) return {NAN, i};
        if (logits[i] > best.logit) best = {logits[i], i};
      }
      return best;
    }

    void norm_rows(const float* weight, const Weight& next, const Member& member) {
      float* normed = norms_ + (size_t)member.index * norm_stride();
      const Rows rows = rows_for(next, prepared_);
      const Range mine = member.share(inputs_.num_tokens);
      for (int row = mine.begin; row < mine.end; ++row) {
        rms_norm(hidden(row), weight, model_.hidden_size, model_.norm_eps, normed);
        prepare_row(next.format, normed, next.k, rows, row);
      }
    }

    void prepare_rows(const float* x, const Weight& next, const Member& member) {
      const Rows rows = rows_for(next, prepared_);
      const Range mine = member.share(inputs_.num_tokens);
      for (int row = mine.begin; row < mine.end; ++row)
        prepare_row(next.format, x + (size_t)row * next.k, next.k, rows, row);
    }

    template <class Take>
    void product(const Weight& weight, const Member& member, Take take) {
      const Range panels = member.share(weight.panels());
      matmul(weight, rows_for(weight, prepared_), inputs_.num_tokens, panels.begin, panels.end,
             [&](int row, int panel, f32x16 a, f32x16 b) { take(row, panel * PANEL, a, b); });
    }

    void add_product(const Weight& weight, const float* bias, const Member& member) {
      product(weight, member, [&](int row, int first, f32x16 a, f32x16 b) {
        float* out = hidden(row) + first;
        const float* soon = out + (size_t)MAX_ROWS * model_.hidden_size;  // of the next block
        __builtin_prefetch(soon, 1);
        __builtin_prefetch(soon + LANES, 1);
        if (first + PANEL <= weight.n && !bias) {
          store(out, load(out) + a);
          store(out + LANES, load(out + LANES) + b);
          return;
        }
        alignas(64) float sums[PANEL];
        put(sums - first, weight.n, bias, first, a, b);
        for (int i = 0; i < std::min(PANEL, weight.n - first); ++i) out[i] += sums[i];
      });
    }

    // silu(gate) * up. Both are in one weight, gates first; their panels are taken in pairs.
    void gated_product(const Layer& layer, const Member& member) {
      const int size = model_.intermediate_size, num_pairs = size / PANEL;
      const Rows rows = rows_for(layer.gate_up, prepared_);
      const float* bias = layer.gate_up_bias;
      const Range pairs = member.share(num_pairs);
      alignas(64) float gates[MAX_ROWS][PANEL], ups[MAX_ROWS][PANEL];
      const Format format = layer.gate_up.format;
      each_panel_block(format, inputs_.num_tokens, pairs.begin, pairs.end, [&](int pair, int first, int last) {
        panel_product(layer.gate_up, pair, rows, first, last, gates[0]);
        panel_product(layer.gate_up, pair + num_pairs, rows, first, last, ups[0]);
        for (int row = first; row < last; ++row) {
          for (int i = 0; i < PANEL; i += LANES) {
            f32x16 gate = load(gates[row - first] + i), up = load(ups[row - first] + i);
            if (bias) {
              gate += load(bias + pair * PANEL + i);
              up += load(bias + size + pair * PANEL + i);
            }
            store(gated_ + (size_t)row * size + pair * PANEL + i, silu(gate) * up);
          }
        }
      });
    }

    void rotate_and_store(const Layer& layer, const PagedAttention<Element>& paged,
                          const Member& member) {
      each_row(sequences_, member.share(inputs_.num_tokens),
               [&](const SequenceShare& sequence, int row, int position) {
                 rotate_and_store_row(layer, paged, sequence, row, position);
               });
    }

    void rotate_and_store_row(const Layer& layer, const PagedAttention<Element>& paged,
                              const SequenceShare& sequence, int row, int position) {
      const int dim = model_.head_dim, half_dim = model_.rotary_dim / 2;
      float* query = qkv_ + (size_t)row * qkv_size_;
      float* key = query + model_.num_heads * dim;
      float* value = key + model_.num_kv_heads * dim;
      for (float* head = query; head < value; head += dim) {
        const float* norm = head < key ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm(head, norm, dim, model_.norm_eps, head);
        if (layer.rotates)
          rotate(head, cos_ + (size_t)row * half_dim, sin_ + (size_t)row * half_dim, half_dim);
      }
      paged.put_queries(query, queries_ + row * query_stride());
      paged.store_kv(sequence, position, key, value);
    }

    void paged_attention(const Layer& layer, const PagedAttention<Element>& paged, int index,
                         const Member& member) {
      plan_of(layer.window)
          .attend(paged, {queries_, attended_, partials_, layer.window}, next_task_[index], member);
    }

    KVLayer kv_layer(int index) const {
      const size_t side = (size_t)cache_.num_blocks * model_.num_kv_heads * cache_.block_size *
                          PagedAttention<Element>::row_bytes(model_.head_dim);
      char* keys = cache_.data + 2 * side * index;
      return {keys, keys + side};
    }

    size_t query_stride() const {
      return model_.num_heads * Words<Element>::query_bytes(model_.head_dim);
    }
    float* hidden(int row) const { return outputs_.hidden + (size_t)row * model_.hidden_size; }
    size_t norm_stride() const {
      return std::max({model_.hidden_size, model_.intermediate_size,
                       model_.num_heads * model_.head_dim}) + LANES;
    }

    const Model& model_;
    const std::vector<Layer>& layers_;
    const Cache cache_;
    const StepInputs inputs_;
    const StepOutputs outputs_;
    const int num_threads_;
    const AttentionShape shape_;
    std::vector<std::atomic<int>> next_task_;
    std::vector<SequenceShare> sequences_;
    std::vector<std::unique_ptr<AttentionPlan<Element>>> plans_;
    int qkv_size_ = 0;
    Rows prepared_;
    float *qkv_, *attended_, *gated_, *cos_, *sin_, *partials_;
    float* norms_;
    char* queries_;
    Best* bests_;
  };

  const Model model_;
  const std::vector<Layer> layers_;
  Scratch scratch_;
};

}  // namespace twostroke
