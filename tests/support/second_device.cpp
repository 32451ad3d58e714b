// A device type in the memory of the host, with two devices of it, so that models over several devices can be tested
// where there is one CPU. Its operators are those of the CPU; like a GPU's, they refuse tensors of different devices.
#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBody.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <optional>

namespace {

constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old(kType, current);
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    return {data, data, &Memory::free, c10::Device(kType, current)};
  }
  static void free(void* data) {
    if (data) c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current;
    current = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto made = impl->allocator()->allocate(size);
    std::memcpy(made.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(size);
  }
};

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t wanted = impl->itemsize() * (impl->numel() + impl->storage_offset());
  if (wanted > impl->unsafe_storage().nbytes()) {
    Hooks().resizePrivateUse1Bytes(impl->unsafe_storage(), wanted);
  }
  return self;
}

void of_one_device(const c10::OperatorHandle& op, std::optional<c10::Device>& found, const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
  if (!found) found = tensor.device();
  TORCH_CHECK(
      *found == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
      *found, " and ", tensor.device(), "! (when checking arguments of ", op.schema().name(), ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> found;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      of_one_device(op, found, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) of_one_device(op, found, tensor);
    } else if (value.isOptionalTensorList()) {
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor && !tensor->is_cpu()) of_one_device(op, found, *tensor);  // indices may be on the host
      }
    } else if (value.isDevice()) {
      if (!found) found = value.toDevice();
    }
  }
  c10::OptionalDeviceGuard guard(found);
  at::native::cpu_fallback(op, stack);
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &at::native::set_);
}

static int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 0;
}();
