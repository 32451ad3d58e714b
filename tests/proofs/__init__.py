"""Attacks on the proofs: what is said of expressions is compared with their values at every query and key."""
