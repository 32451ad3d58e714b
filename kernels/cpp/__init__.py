"""Generated C++ kernels for CPUs: one file per spec, compiled once by the compiler that Inductor uses."""
