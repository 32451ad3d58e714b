// Calls a kernel with the tensors of an op, through PyTorch's stable ABI (stable_abi.h). Who includes it says how a kernel is found, by
// `kernel_of`: the launcher (launcher.cpp) of a process, or of a package (packaged.cpp).
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"
#include "processor.h"
#include "stable_abi.h"
#include "workers.h"

namespace {

using Kernel = void (*)(const kv::Call*);

// The kernel of a spec; raises where there is none.
Kernel kernel_of(const std::string& spec);

// No tensor is one without data.
kv::Tensor seen(const At& x) {
  kv::Tensor out{};
  if (!x) return out;
  const int64_t *sizes = x.sizes(), *strides = x.strides();
  out.data = x.data();
  out.dims = x.dims();
  for (int64_t i = 0; i < out.dims && i < kv::MOST_DIMS; ++i) {
    out.size[i] = sizes[i];
    out.stride[i] = strides[i];
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

At attend(const At& q, const At& k, const At& v, const std::vector<At>& buffers, const At& positions,
          const std::vector<At>& rope, const At& sinks, const At& bias, const At& page_table, const At& chosen,
          const std::vector<At>& leaves, int64_t v_dim, const std::string& spec) {
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

At attend_many(const At& q, const At& k, const At& v, const At& tokens, const At& positions, const At& sinks,
               const At& bias, const At& allowed, const At& near, const std::vector<At>& leaves,
               const std::string& spec) {
  return attended(q, k, v,
                  {seen(tokens), seen(positions), seen(sinks), seen(bias), seen(allowed),
                   near ? vectors(near, "q") : kv::Tensor{}},
                  leaves, spec);
}

// The same, and what queries give each key goes to `columns`. places: of queries and keys, where a bias takes them to be.
At attend_columns(const At& q, const At& k, const At& v, const At& tokens, const At& positions, const At& sinks,
                  const At& bias, const At& query_places, const At& key_places, const At& columns,
                  const std::vector<At>& leaves, const std::string& spec) {
  return attended(q, k, v,
                  {seen(tokens), seen(positions), seen(sinks), seen(bias), kv::Tensor{}, vectors(columns, "columns"),
                   seen(query_places), seen(key_places)},
                  leaves, spec);
}

// x is dense, its last dimension the weights' second; results of several follow each other. layers: a weight and a bias,
// which may be none, of each.
At linears(const At& x, const std::vector<kv::Tensor>& layers, const std::string& spec) {
  if (layers.size() > 2 * kv::MOST_LAYERS)
    throw std::runtime_error("a C++ kernel takes at most 16 linear layers at a time");
  const int64_t *sizes = x.sizes(), last = x.dims() - 1;
  std::vector<int64_t> size(sizes, sizes + last);
  size.push_back(0);
  for (size_t i = 0; i < layers.size(); i += 2) {
    if (layers[i].dims != 2 || layers[i].size[1] != sizes[last])
      throw std::runtime_error("a C++ kernel of linear layers needs a column of a weight for each channel of x");
    size.back() += layers[i].size[0];
  }
  At out = empty(size, dense(size), x);
  std::vector<kv::Tensor> tensors{seen(out), vectors(x, "x")};
  tensors.insert(tensors.end(), layers.begin(), layers.end());
  tensors.push_back(kv::Tensor{});
  run(spec, tensors);
  return out;
}

// biases: none, or of each.
At linears(const At& x, const std::vector<At>& weights, const std::vector<At>& biases, const std::string& spec) {
  std::vector<kv::Tensor> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    layers.push_back(vectors(weights[i], "a weight"));
    layers.push_back(i < biases.size() ? seen(biases[i]) : kv::Tensor{});
  }
  return linears(x, layers, spec);
}

// How many rows a kernel is faster at than PyTorch's library. On AMD's processors that multiplies floats by AVX2 (MKL), and
// takes as long as the kernel of many bfloat16 (oneDNN).
int64_t most_rows(const At& x, const std::string& spec) {
  if (spec.rfind("linear_tiles", 0) == 0) return kv::MANY_HALVES;
  if (spec.rfind("linear_few", 0) != 0) return INT64_MAX;
  const bool floats = x.dtype() == aoti_torch_dtype_float32();
  if (kv::AMD) return floats ? INT64_MAX : kv::MANY_HALVES;
  return floats ? kv::FEW_ROWS : kv::FEW_HALVES;
}

At library_linear(const At& x, const At& weight, const At& bias) {
  // What is called takes what it is given: holds of its own, and of a tensor that may be none the place of one.
  const auto own = [](const At& of) { return reinterpret_cast<StableIValue>(held(of.get()).given_away()); };
  StableIValue stack[] = {own(x), own(weight), 0};
  if (bias) stack[2] = reinterpret_cast<StableIValue>(new StableIValue(own(bias)));
  expect(torch_call_dispatcher("aten::linear", "", stack, ABI), "a linear layer");
  return At(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

At linear(const At& x, const At& weight, const At& bias, const std::string& spec) {
  const int64_t* sizes = x.sizes();
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims(); ++i) rows *= sizes[i];
  if (rows > most_rows(x, spec)) return library_linear(x, weight, bias);
  return linears(x, {vectors(weight, "a weight"), seen(bias)}, spec);
}

}  // namespace
