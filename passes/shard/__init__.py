"""Sharding: one graph for each of several ranks, which together compute what the whole graph computes (`shard.py`)."""
