// Calls a kernel with the tensors of an op, through PyTorch's stable ABI. Who includes it says how a kernel is found, by
// `kernel_of`: the launcher (launcher.cpp) of a process, or of a package (packaged.cpp).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"
#include "workers.h"

// Older PyTorch, 2.11 among them, knows the check by its former name only.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace {

using At = torch::stable::Tensor;
using Kernel = void (*)(const kv::Call*);

// The kernel of a spec; raises where there is none.
Kernel kernel_of(const std::string& spec);

kv::Tensor seen(const At& x) {
  kv::Tensor out{};
  out.data = x.data_ptr();
  out.dims = x.dim();
  for (int64_t i = 0; i < out.dims && i < kv::MOST_DIMS; ++i) {
    out.size[i] = x.size(i);
    out.stride[i] = x.stride(i);
  }
  return out;
}

// The same of vectors: their channels must lie together.
kv::Tensor vectors(const At& x, const char* name) {
  const kv::Tensor out = seen(x);
  const int64_t last = out.dims - 1;
  if (last < 0 || last >= kv::MOST_DIMS || (out.size[last] > 1 && out.stride[last] != 1))
    throw std::runtime_error(std::string("a C++ kernel needs the channels of ") + name + " side by side");
  return out;
}

kv::Tensor seen(const std::optional<At>& x) { return x ? seen(*x) : kv::Tensor{}; }

struct Memory {
  void* data = nullptr;
  int64_t size = 0;
  ~Memory() { std::free(data); }
};

void* workspace(int64_t bytes) {
  thread_local Memory own;
  if (own.size < bytes) {
    std::free(own.data);
    own.size = (bytes + bytes / 2 + 63) / 64 * 64;
    own.data = std::aligned_alloc(64, own.size);
    if (!own.data) {
      own.size = 0;
      throw std::bad_alloc();
    }
  }
  return own.data;
}

kv::Workers workers;

struct Tasks {
  kv::Task task;
  void* context;
  int64_t ended;  // when the caller had nothing left to do
};

void parallel(int64_t threads, kv::Task task, void* context) {
  const int64_t sharing = workers.of(threads), began = kv::nanoseconds();
  Tasks tasks{task, context, began};
  torch_parallel_for(
      0, threads, (threads + sharing - 1) / sharing,
      [](int64_t begin, int64_t end, void* own) {
        auto* given = static_cast<Tasks*>(own);
        for (int64_t i = begin; i < end; ++i) given->task(i, given->context);
        if (begin == 0) given->ended = kv::nanoseconds();
      },
      &tasks);
  const int64_t ended = kv::nanoseconds();
  if (sharing > 1) workers.met(ended - began, ended - tasks.ended);
}

std::vector<int64_t> dense(const std::vector<int64_t>& size) {
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t i = size.size() - 1; i > 0; --i) stride[i - 1] = stride[i] * size[i];
  return stride;
}

At empty(const std::vector<int64_t>& size, const std::vector<int64_t>& stride, const At& like) {
  int32_t dtype = 0, device = 0, index = 0;
  AtenTensorHandle made = nullptr;
  aoti_torch_get_dtype(like.get(), &dtype);
  aoti_torch_get_device_type(like.get(), &device);
  aoti_torch_get_device_index(like.get(), &index);
  if (aoti_torch_empty_strided(size.size(), size.data(), stride.data(), dtype, device, index, &made))
    throw std::bad_alloc();
  return At(made);
}

// What notes the calls of a thread while they are made (step.h); null: nothing does.
thread_local void (*noting)(Kernel kernel, const std::vector<kv::Tensor>& tensors) = nullptr;

void run(const std::string& spec, const std::vector<kv::Tensor>& tensors) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  const kv::Call call{tensors.data(), threads, parallel, workspace};
  const Kernel kernel = kernel_of(spec);
  kernel(&call);
  if (noting) noting(kernel, tensors);
}

At attend(At q, At k, At v, std::vector<At> buffers, At positions, std::vector<At> rope, std::optional<At> sinks,
          std::optional<At> bias, std::optional<At> page_table, std::optional<At> chosen, std::vector<At> leaves,
          int64_t v_dim, std::string spec) {
  const std::vector<int64_t> size{q.size(0), q.size(1), q.size(2), v_dim};
  At out = empty(size, dense(size), q);
  std::vector<kv::Tensor> tensors{seen(out),   vectors(q, "q"), vectors(k, "k"),  vectors(v, "v"), seen(positions),
                                  seen(sinks), seen(bias),      seen(page_table)};
  for (size_t i = 0; i < 2; ++i) tensors.push_back(i < rope.size() ? seen(rope[i]) : kv::Tensor{});
  tensors.push_back(seen(chosen));
  for (const At& leaf : leaves) tensors.push_back(seen(leaf));
  for (const At& buffer : buffers) tensors.push_back(vectors(buffer, "the cache"));
  run(spec, tensors);
  return out;
}

// Many queries, by a kernel that takes what `more` has besides. Heads of a token lie side by side in what is given back:
// so the next layer wants them.
At attended(const At& q, const At& k, const At& v, std::initializer_list<kv::Tensor> more,
            const std::vector<At>& leaves, const std::string& spec) {
  const std::vector<int64_t> size{q.size(0), q.size(1), q.size(2), v.size(3)};
  At out = empty(size, {size[1] * size[2] * size[3], size[3], size[1] * size[3], 1}, q);
  std::vector<kv::Tensor> tensors{seen(out), vectors(q, "q"), vectors(k, "k"), vectors(v, "v")};
  tensors.insert(tensors.end(), more);
  for (const At& leaf : leaves) tensors.push_back(seen(leaf));
  run(spec, tensors);
  return out;
}

At attend_many(At q, At k, At v, At tokens, At positions, std::optional<At> sinks, std::optional<At> bias,
               std::optional<At> allowed, std::optional<At> near, std::vector<At> leaves, std::string spec) {
  return attended(q, k, v,
                  {seen(tokens), seen(positions), seen(sinks), seen(bias), seen(allowed),
                   near ? vectors(*near, "q") : kv::Tensor{}},
                  leaves, spec);
}

// The same, and what queries give each key goes to `columns`. places: of queries and keys, where a bias takes them to be.
At attend_columns(At q, At k, At v, At tokens, At positions, std::optional<At> sinks, std::optional<At> bias,
                  std::optional<At> query_places, std::optional<At> key_places, At columns, std::vector<At> leaves,
                  std::string spec) {
  return attended(q, k, v,
                  {seen(tokens), seen(positions), seen(sinks), seen(bias), kv::Tensor{}, vectors(columns, "columns"),
                   seen(query_places), seen(key_places)},
                  leaves, spec);
}

// x is dense, its last dimension the weights' second; results of several follow each other. biases: none, or of each.
At linears(At x, std::vector<At> weights, std::vector<At> biases, std::string spec) {
  if (weights.size() > kv::MOST_LAYERS) throw std::runtime_error("a C++ kernel takes at most 16 linear layers at a time");
  std::vector<int64_t> size(x.dim());
  for (size_t i = 0; i + 1 < size.size(); ++i) size[i] = x.size(i);
  size.back() = 0;
  for (const At& weight : weights) size.back() += weight.size(0);
  At out = empty(size, dense(size), x);
  std::vector<kv::Tensor> tensors{seen(out), vectors(x, "x")};
  for (size_t i = 0; i < weights.size(); ++i) {
    tensors.push_back(vectors(weights[i], "a weight"));
    tensors.push_back(i < biases.size() ? seen(biases[i]) : kv::Tensor{});
  }
  tensors.push_back(kv::Tensor{});
  run(spec, tensors);
  return out;
}

// How many rows a kernel of few is faster at than PyTorch's library, which packs the weights first.
int64_t most_rows(const At& x) {
  return x.scalar_type() == torch::headeronly::ScalarType::Float ? kv::FEW_ROWS : kv::FEW_HALVES;
}

At library_linear(const At& x, const At& weight, const std::optional<At>& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<At>(stack[0]);
}

At linear(At x, At weight, std::optional<At> bias, std::string spec) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  if (spec.rfind("linear_few", 0) == 0 && rows > most_rows(x)) return library_linear(x, weight, bias);
  return linears(x, {weight}, bias ? std::vector<At>{*bias} : std::vector<At>{}, spec);
}

}  // namespace
