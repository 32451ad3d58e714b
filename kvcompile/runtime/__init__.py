"""What runs: the optimized module with its cache, and sessions of exported artifacts."""
