"""The ops of graphs: what the passes write, and what every implementation of the cache is called through."""
