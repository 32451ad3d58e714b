"""Other compilers and runtimes for the graph between attention sites, or for its kernels; each needs a package of its
own."""
