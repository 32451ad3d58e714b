// The ops of generated C++ kernels: looks a kernel up by its spec, and calls it with the tensors of the op.
//
// It is compiled once for a version of PyTorch.

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "launch.h"

namespace {

// Compiles and loads the kernel of a spec. Where it cannot, it gives null and writes why to `message`.
using Loader = void* (*)(const char* spec, char* message, int64_t size);

Loader loader = nullptr;
std::shared_mutex lock;
std::unordered_map<std::string, Kernel> kernels;

Kernel kernel_of(const std::string& spec) {
  {
    std::shared_lock<std::shared_mutex> reading(lock);
    const auto found = kernels.find(spec);
    if (found != kernels.end()) return found->second;
  }
  char message[4096] = "kvcompile is not imported, which compiles its C++ kernels";
  auto made = reinterpret_cast<Kernel>(loader ? loader(spec.c_str(), message, sizeof message) : nullptr);
  if (!made) throw std::runtime_error(message);
  std::unique_lock<std::shared_mutex> writing(lock);
  return kernels.emplace(spec, made).first->second;
}

}  // namespace

// Kernels that were loaded before are asked for again.
extern "C" void kvcompile_set_loader(void* given) {
  std::unique_lock<std::shared_mutex> writing(lock);
  loader = reinterpret_cast<Loader>(given);
  kernels.clear();
}

STABLE_TORCH_LIBRARY_IMPL(kvcompile, CPU, m) {
  m.impl("cpp_attend", TORCH_BOX(&attend));
  m.impl("cpp_attend_many", TORCH_BOX(&attend_many));
  m.impl("cpp_attend_columns", TORCH_BOX(&attend_columns));
  m.impl("cpp_linear", TORCH_BOX(&linear));
  m.impl("cpp_linears", TORCH_BOX(&linears));
}
