// Memory for what a step needs beside its inputs and outputs.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "matmul.h"

namespace twostroke {

// Memory of one step, grown to the largest step so far.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;  // vectors may read past the end
    used_ += bytes;
    if (used_ > size_) return nullptr;
    return (T*)(data_.get() + used_ - bytes);
  }

  // allocate() takes all that one step needs. It is called again where that was more than there is.
  template <class Allocate>
  void fit(Allocate allocate) {
    used_ = 0;
    allocate();
    if (used_ <= size_) return;
    grow(used_ * 5 / 4);
    used_ = 0;
    allocate();
  }

 private:
  void grow(size_t size) {
    data_.reset();
    size_ = 0;
    const size_t whole = (size + 63) / 64 * 64;  // aligned_alloc takes nothing else
    data_.reset((char*)std::aligned_alloc(64, whole));
    if (!data_) throw std::bad_alloc();
    size_ = whole;
    std::memset(data_.get(), 0, whole);
  }

  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0, used_ = 0;
};

inline Rows take_rows(Scratch& scratch, int num_rows, int max_inputs) {
  Rows rows;
  rows.stride = 0;
  rows.groups = 0;
  const size_t whole_rows = round_up(num_rows, ROW_STEP);
  const size_t whole_inputs = round_up(max_inputs, GROUP);
  rows.data = scratch.take<char>(whole_rows * whole_inputs * sizeof(float));
  const size_t groups = whole_rows * whole_inputs / GROUP;
  rows.scales = scratch.take<float>(groups);
  rows.offsets = scratch.take<int32_t>(groups);
  rows.sums = scratch.take<float>(groups);
  return rows;
}

inline Rows rows_for(const Weight& weight, Rows rows) {
  rows.stride = row_bytes(weight.format, weight.k);
  rows.groups = weight.groups();
  return rows;
}

}  // namespace twostroke
