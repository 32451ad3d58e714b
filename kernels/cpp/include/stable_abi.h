// What is called of PyTorch's stable C ABI, and a tensor of it. PyTorch's own headers for C++ (torch/csrc/stable) say the
// same, and take the compiler longer than all else of the launcher, for which a first start waits. These declarations are
// those of torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h; tests compile them side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;

int32_t aoti_torch_dtype_float32();
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle of, AtenTensorHandle* made);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dims);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* made);

AOTITorchError aoti_torch_library_init_impl(const char* space, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* made);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*function)(StableIValue*, uint64_t, uint64_t), uint64_t abi);
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t abi);

AOTITorchError torch_list_size(StableListHandle list, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError torch_string_length(StringHandle text, size_t* length);
AOTITorchError torch_string_c_str(StringHandle text, const char** characters);
AOTITorchError torch_delete_string(StringHandle text);

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                  void (*function)(int64_t begin, int64_t end, void* context), void* context);
AOTITorchError torch_get_num_threads(uint32_t* count);

#if defined(__linux__)
// Since PyTorch 2.13: what the last call that failed was told. Null in older ones.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
#endif

}  // extern "C"

namespace {

// The ABI of PyTorch 2.11, the oldest that is taken: newer ones keep to it with who asks for it.
constexpr uint64_t ABI = (uint64_t{2} << 56) | (uint64_t{11} << 48);

[[noreturn]] void refused(const char* what) {
  std::string said = std::string("PyTorch refuses ") + what;
#if defined(__linux__)
  if (torch_exception_get_what_without_backtrace) said = said + ": " + torch_exception_get_what_without_backtrace();
#endif
  throw std::runtime_error(said);
}

// `what` is what PyTorch was called for.
void expect(AOTITorchError code, const char* what) {
  if (code) refused(what);
}

// A tensor that is shared with PyTorch, or none.
class At {
 public:
  At() = default;
  explicit At(AtenTensorHandle own) : own_(own) {}
  At(At&& other) noexcept : own_(std::exchange(other.own_, nullptr)) {}
  At(const At&) = delete;
  At& operator=(const At&) = delete;
  ~At() {
    if (own_) aoti_torch_delete_tensor_object(own_);
  }

  explicit operator bool() const { return own_ != nullptr; }
  AtenTensorHandle get() const { return own_; }
  AtenTensorHandle given_away() { return std::exchange(own_, nullptr); }

  void* data() const {
    void* found = nullptr;
    expect(aoti_torch_get_data_ptr(own_, &found), "the memory of a tensor");
    return found;
  }
  int64_t dims() const {
    int64_t found = 0;
    expect(aoti_torch_get_dim(own_, &found), "the dimensions of a tensor");
    return found;
  }
  const int64_t* sizes() const {
    int64_t* found = nullptr;
    expect(aoti_torch_get_sizes(own_, &found), "the sizes of a tensor");
    return found;
  }
  const int64_t* strides() const {
    int64_t* found = nullptr;
    expect(aoti_torch_get_strides(own_, &found), "the strides of a tensor");
    return found;
  }
  int64_t size(int64_t dim) const { return sizes()[dim]; }
  int32_t dtype() const {
    int32_t found = 0;
    expect(aoti_torch_get_dtype(own_, &found), "the dtype of a tensor");
    return found;
  }

 private:
  AtenTensorHandle own_ = nullptr;
};

// One more hold of a tensor that stays the caller's.
At held(AtenTensorHandle of) {
  AtenTensorHandle made = nullptr;
  expect(aoti_torch_new_tensor_handle(of, &made), "a tensor");
  return At(made);
}

At empty(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const At& like) {
  int32_t type = 0, index = 0;
  AtenTensorHandle made = nullptr;
  expect(aoti_torch_get_device_type(like.get(), &type), "the device of a tensor");
  expect(aoti_torch_get_device_index(like.get(), &index), "the device of a tensor");
  expect(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), like.dtype(), type, index, &made),
         "memory of a result");
  return At(made);
}

}  // namespace
