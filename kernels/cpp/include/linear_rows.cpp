// A linear layer of more than one token: y[m][n] = sum over k of x[m][k] w[n][k], + b[n], with sums in float. KV_FLOATS: its
// numbers are multiplied as floats, for a processor that has no products of their dtype, or whose products of float are
// faster. KV_TILES, of the instruction set: bfloat16 is multiplied as tiles.

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "linear_few.h"
#include "linear_many.h"
#if defined(KV_TILES)
#include "linear_tiles.h"
#endif

using namespace kv;

namespace {

#if defined(KV_FLOATS)
using Multiplied = float;
#else
using Multiplied = Operand<KV_MODEL>;
#endif

// Whether vectors are so few that packing weights for them takes longer than it spares: soonest where numbers are packed as
// they are and vectors are wide.
bool few(int64_t rows, int64_t channels) {
  if (channels == 0) return true;  // there is nothing to pack
  return rows <= (W >= 16 && std::is_same_v<Multiplied, KV_MODEL> ? 8 : 16);
}

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  enum { OUT, X, WEIGHT, BIAS };
  const Tensor &out = call->tensors[OUT], &x = call->tensors[X], &weight = call->tensors[WEIGHT], &bias = call->tensors[BIAS];
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims; ++i) rows *= x.size[i];
  if (rows == 0) return;
#if defined(KV_TILES)
  if constexpr (std::is_same_v<KV_MODEL, bf16> && std::is_same_v<Multiplied, bf16>)
    if (weight.size[1] > 0 && has_tiles()) return tiled_rows(*call, out, x, weight, bias, rows);
#endif
  if (few(rows, weight.size[1])) return few_rows<KV_MODEL>(*call, out, x, weight, bias, rows);
  many_rows<KV_MODEL, Multiplied>(*call, out, x, weight, bias, rows);
}
