"""The role linear: what the weights of a decode step are read by."""
