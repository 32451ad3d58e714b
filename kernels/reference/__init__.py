"""The cache in plain PyTorch: what Inductor compiles where no generated kernel runs, and what those are held
against."""
