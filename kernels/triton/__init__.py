"""Generated Triton kernels: one readable source file per `KernelSpec` (see `spec.py` for the roles).

    spec --render--> source file in the user's cache --launch--> torch.library.triton_op --> Inductor, AOTInductor

`host/attention.py` composes launches of roles (`host/call.py`) to what `kvcompile::cached_attention` promises;
`reference` is their oracle, and neither imports the other.
"""
