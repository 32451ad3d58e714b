"""Parts of kernels that read a tile of slots: where it is, what is loaded, what its elements become."""
