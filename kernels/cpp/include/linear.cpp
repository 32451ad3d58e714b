// A linear layer of one token.

#include <algorithm>

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "linear_few.h"

using namespace kv;

enum { OUT, X, WEIGHT, BIAS };

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor* given = call->tensors;
  few_rows<KV_MODEL>(*call, given[OUT], given[X], given[WEIGHT], given[BIAS], 1);
}
