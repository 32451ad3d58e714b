// Where rows of a part stand: [batch or pages, heads, rows, ...]; see kernels/reference/paged.py.
#pragma once

namespace kv {

struct Place {
  int64_t batch, head;
};

template <class T>
inline T* row_in(const Tensor& part, Place at, int64_t row) {
  return part.as<T>() + at.batch * part.stride[0] + at.head * part.stride[1] + row * part.stride[2];
}

// The row of a sequence whose pages, of PER_PAGE rows each, a table lists.
template <int64_t PER_PAGE, class T>
inline T* row_in_pages(const Tensor& part, const int32_t* pages, Place at, int64_t row) {
  return row_in<T>(part, {pages[row / PER_PAGE], at.head}, row % PER_PAGE);
}

}  // namespace kv
