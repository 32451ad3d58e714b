"""From an op to launches: which kernels a call is made of, with which arguments, on which device."""
