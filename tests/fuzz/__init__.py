"""A fuzzer of decoders: plausible decoders drawn from a grammar, each of which must be exact or refused.

`spec` is a decoder as data; `draw` draws one; the rooms (`embeddings`, `positions`, `mixers`, `masks`, `biases`,
`scales`, `softmaxes`, `selects`, `spellings`, `outputs`) hold its ingredients; `decoder` builds the module; `check`
compares it with the original over the whole text. `python -m tests.fuzz --seeds 0:500` prints a table.

How to add an ingredient: write it into its room as a rule (what it does, how its numbers are drawn, whether a cache
can hold it); nothing else. A failure that was found goes into `failures` as a spec, since a seed means another
decoder once the grammar has grown.
"""
