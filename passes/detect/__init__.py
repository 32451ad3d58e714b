"""Detection: every attention block of a captured graph, its positions, its limits, or what is in the way."""
