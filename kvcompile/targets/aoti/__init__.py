"""Target aoti: machine code made by AOTInductor, and the session that runs it with PyTorch alone."""
