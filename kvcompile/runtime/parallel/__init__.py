"""Ranks: processes that each have a part of one model, and compute its results together.

| file | what it does |
|---|---|
| `options.py` | what `parallel=` may say |
| `group.py` | the processes of a group: how they meet, agree, and how one that fails is told by the others |
| `skeleton.py` | the original model without its weights, for its configuration and its `generate` |
"""
