// The ops of generated C++ kernels: looks a kernel up by its spec, and calls it with the tensors of the op.
//
// It is compiled once for a version of PyTorch.

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "launch.h"
#include "step.h"

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

thread_local Program* noted = nullptr;

extern "C" void* kvcompile_step_new() { return new Program; }
extern "C" void kvcompile_step_free(void* program) { delete static_cast<Program*>(program); }

// From now on, calls of kernels by this thread are noted in a program; null: in none.
extern "C" void kvcompile_step_note(void* program) {
  noted = static_cast<Program*>(program);
  noting = noted ? [](Kernel kernel, const std::vector<kv::Tensor>& tensors) { noted->calls.push_back({kernel, tensors}); }
                 : static_cast<decltype(noting)>(nullptr);
}

// Notes a function of pointers and whole numbers; whether it could be. alone: it has threads of its own.
extern "C" bool kvcompile_step_function(void* program, void* function, const int64_t* given, int64_t count, bool alone) {
  if (count > static_cast<int64_t>(MOST_ARGUMENTS)) return false;
  static_cast<Program*>(program)->calls.push_back({nullptr, {}, function, {given, given + count}, alone});
  return true;
}

extern "C" int64_t kvcompile_step_size(void* program) { return static_cast<Program*>(program)->calls.size(); }

// Makes the calls once more; where one fails, `message` says why, and it gives false. took: of each, its nanoseconds;
// null: they are not asked for.
extern "C" bool kvcompile_step_run(void* program, char* message, int64_t size, int64_t* took) {
  try {
    run_step(*static_cast<Program*>(program), took);
    return true;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), size - 1);
  } catch (...) {
    std::strncpy(message, "an error that is no exception of C++'s", size - 1);
  }
  return false;
}

namespace {

// What a call hands over, taken from it: a function for each type.

At tensor(StableIValue x) { return At(reinterpret_cast<AtenTensorHandle>(x)); }

At maybe(StableIValue x) {
  auto* place = reinterpret_cast<StableIValue*>(x);
  if (!place) return At();
  At found = tensor(*place);
  delete place;
  return found;
}

std::vector<At> tensors(StableIValue x) {
  const auto list = reinterpret_cast<StableListHandle>(x);
  size_t size = 0;
  expect(torch_list_size(list, &size), "the size of a list");
  std::vector<At> found;
  found.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue item = 0;
    expect(torch_list_get_item(list, i, &item), "what is in a list");
    found.push_back(tensor(item));
  }
  expect(torch_delete_list(list), "to free a list");
  return found;
}

int64_t number(StableIValue x) { return static_cast<int64_t>(x); }

std::string text(StableIValue x) {
  const auto given = reinterpret_cast<StringHandle>(x);
  size_t length = 0;
  const char* characters = nullptr;
  expect(torch_string_length(given, &length), "the length of a text");
  expect(torch_string_c_str(given, &characters), "a text");
  std::string found(characters, length);
  expect(torch_delete_string(given), "to free a text");
  return found;
}

void give(StableIValue* stack, At x) { stack[0] = reinterpret_cast<StableIValue>(x.given_away()); }

void expect_count(uint64_t count, uint64_t wanted) {
  if (count != wanted) throw std::runtime_error("an op of kvcompile was called with other arguments than it has");
}

void boxed_attend(StableIValue* x, uint64_t count, uint64_t) {
  expect_count(count, 13);
  give(x, attend(tensor(x[0]), tensor(x[1]), tensor(x[2]), tensors(x[3]), tensor(x[4]), tensors(x[5]), maybe(x[6]),
                 maybe(x[7]), maybe(x[8]), maybe(x[9]), tensors(x[10]), number(x[11]), text(x[12])));
}

void boxed_attend_many(StableIValue* x, uint64_t count, uint64_t) {
  expect_count(count, 11);
  give(x, attend_many(tensor(x[0]), tensor(x[1]), tensor(x[2]), tensor(x[3]), tensor(x[4]), maybe(x[5]), maybe(x[6]),
                      maybe(x[7]), maybe(x[8]), tensors(x[9]), text(x[10])));
}

void boxed_attend_columns(StableIValue* x, uint64_t count, uint64_t) {
  expect_count(count, 12);
  give(x, attend_columns(tensor(x[0]), tensor(x[1]), tensor(x[2]), tensor(x[3]), tensor(x[4]), maybe(x[5]), maybe(x[6]),
                         maybe(x[7]), maybe(x[8]), tensor(x[9]), tensors(x[10]), text(x[11])));
}

void boxed_linear(StableIValue* x, uint64_t count, uint64_t) {
  expect_count(count, 4);
  give(x, linear(tensor(x[0]), tensor(x[1]), maybe(x[2]), text(x[3])));
}

void boxed_linears(StableIValue* x, uint64_t count, uint64_t) {
  expect_count(count, 4);
  give(x, linears(tensor(x[0]), tensors(x[1]), tensors(x[2]), text(x[3])));
}

// The library stays as long as the process.
const bool REGISTERED = [] {
  TorchLibraryHandle library = nullptr;
  expect(aoti_torch_library_init_impl("kvcompile", "CPU", __FILE__, __LINE__, &library), "a library of ops");
  const auto op = [&](const char* name, void (*function)(StableIValue*, uint64_t, uint64_t)) {
    expect(torch_library_impl(library, name, function, ABI), name);
  };
  op("cpp_attend", boxed_attend);
  op("cpp_attend_many", boxed_attend_many);
  op("cpp_attend_columns", boxed_attend_columns);
  op("cpp_linear", boxed_linear);
  op("cpp_linears", boxed_linears);
  return true;
}();

}  // namespace
