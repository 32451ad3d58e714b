"""The coverage harness: every causal-LM type of the installed transformers release, tiny and random."""
