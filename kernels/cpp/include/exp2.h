// 2^r for |r| <= 1/2 as a sum of EXP2[i] r^i, off by at most 2.7e-6 of it: for numbers that are rounded to bfloat16.
#pragma once

namespace kv {

constexpr float EXP2[] = {0.999999285f, 0.693121791f, 0.240247443f, 0.0559178591f, 0.00957010221f};

}  // namespace kv
