"""What users hold: the optimized module, its cache, and generation."""
