// The ops of generated C++ kernels in an AOTInductor package: C functions that its code calls, and that are linked into it
// together with its kernels. KV_KERNELS lists these: X(name) for each, whose function is kvcompile_<name>.

#include <exception>
#include <iostream>

#include "launch.h"

#define X(name) extern "C" void kvcompile_##name(const kv::Call*);
KV_KERNELS
#undef X

namespace {

struct Named {
  const char* name;
  Kernel kernel;
};

const Named KERNELS[] = {
#define X(name) {#name, kvcompile_##name},
    KV_KERNELS
#undef X
};

Kernel kernel_of(const std::string& spec) {
  for (const Named& own : KERNELS)
    if (spec == own.name) return own.kernel;
  throw std::runtime_error("this package has no kernel " + spec);
}

// A tensor that stays the caller's.
At borrowed(AtenTensorHandle given) { return held(given); }

At borrowed(AtenTensorHandle* given) { return given ? held(*given) : At(); }

std::vector<At> borrowed(const AtenTensorHandle* given, int64_t count) {
  std::vector<At> found;
  for (int64_t i = 0; i < count; ++i) found.push_back(borrowed(given[i]));
  return found;
}

// The result of `made` becomes the caller's; what is thrown is told, for C functions throw nothing.
template <class Made>
AOTITorchError given_back(AtenTensorHandle* out, const Made& made) {
  try {
    *out = made().given_away();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "kvcompile: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_cpp_attend(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, const AtenTensorHandle* buffers, int64_t buffers_count,
    AtenTensorHandle positions, const AtenTensorHandle* rope, int64_t rope_count, AtenTensorHandle* sinks,
    AtenTensorHandle* bias, AtenTensorHandle* page_table, AtenTensorHandle* chosen, const AtenTensorHandle* leaves,
    int64_t leaves_count, int64_t v_dim, const char* spec, AtenTensorHandle* out) {
  return given_back(out, [&] {
    return attend(borrowed(q), borrowed(k), borrowed(v), borrowed(buffers, buffers_count), borrowed(positions),
                  borrowed(rope, rope_count), borrowed(sinks), borrowed(bias), borrowed(page_table), borrowed(chosen),
                  borrowed(leaves, leaves_count), v_dim, spec);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_cpp_attend_many(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle tokens, AtenTensorHandle positions,
    AtenTensorHandle* sinks, AtenTensorHandle* bias, AtenTensorHandle* allowed, AtenTensorHandle* near,
    const AtenTensorHandle* leaves, int64_t leaves_count, const char* spec, AtenTensorHandle* out) {
  return given_back(out, [&] {
    return attend_many(borrowed(q), borrowed(k), borrowed(v), borrowed(tokens), borrowed(positions), borrowed(sinks),
                       borrowed(bias), borrowed(allowed), borrowed(near), borrowed(leaves, leaves_count), spec);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_cpp_attend_columns(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle tokens, AtenTensorHandle positions,
    AtenTensorHandle* sinks, AtenTensorHandle* bias, AtenTensorHandle* query_places, AtenTensorHandle* key_places,
    AtenTensorHandle columns, const AtenTensorHandle* leaves, int64_t leaves_count, const char* spec,
    AtenTensorHandle* out) {
  return given_back(out, [&] {
    return attend_columns(borrowed(q), borrowed(k), borrowed(v), borrowed(tokens), borrowed(positions),
                          borrowed(sinks), borrowed(bias), borrowed(query_places), borrowed(key_places),
                          borrowed(columns), borrowed(leaves, leaves_count), spec);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_cpp_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                                    const char* spec, AtenTensorHandle* out) {
  return given_back(out, [&] { return linear(borrowed(x), borrowed(weight), borrowed(bias), spec); });
}

extern "C" AOTITorchError aoti_torch_cpu_cpp_linears(AtenTensorHandle x, const AtenTensorHandle* weights, int64_t count,
                                                     const AtenTensorHandle* biases, int64_t biases_count,
                                                     const char* spec, AtenTensorHandle* out) {
  return given_back(out, [&] { return linears(borrowed(x), borrowed(weights, count), borrowed(biases, biases_count), spec); });
}
