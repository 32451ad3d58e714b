"""The generated Triton kernels as TensorRT plugins: quick-deployable ones (QDP) with an ahead-of-time implementation.

    a launch of a KernelSpec -> Plugin (what goes in, and comes out) -> PTX -> tensorrt.plugin.register, aot_impl

| file | what |
|---|---|
| `launched.py` | a site's launches with symbolic sizes |
| `description.py` | a launch as a plugin: inputs, scalars, outputs, aliases |
| `wrapper.py` | the kernel behind the argument order that TensorRT has |
| `ptx.py` | its PTX, ahead of time and without a GPU |
| `expressions.py` | sizes as TensorRT's symbolic expressions |
| `qdp.py` | registration with `tensorrt.plugin` |

What is proven, and what is not: docs/tensorrt-plugins.md.
"""
