"""Detection rules, one idiom a file."""
