// Who made the processor: what is foreseen by it, and what libraries do on it, differs, and no flag says so.
#pragma once

namespace kv {

#if defined(__linux__) && defined(__x86_64__)
static const bool INTEL = (__builtin_cpu_init(), __builtin_cpu_is("intel")), AMD = __builtin_cpu_is("amd");
#else
constexpr bool INTEL = false, AMD = false;
#endif

}  // namespace kv
