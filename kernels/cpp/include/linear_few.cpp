// A linear layer of few tokens: who calls it leaves more of them to PyTorch (`linear` of launch.h).

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "linear_few.h"

using namespace kv;

extern "C" void kvcompile_kernel(const Call* call) {
  enum { OUT, X, WEIGHT, BIAS };
  const Tensor* given = call->tensors;
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < given[X].dims; ++i) rows *= given[X].size[i];
  if (rows > 0) few_rows<KV_MODEL>(*call, given[OUT], given[X], given[WEIGHT], given[BIAS], rows);
}
