"""Translation: what stands between Q K^T and the weighted sum, read from the graph instead of being sampled.

translate    an element of any node as an expression over positions and leaves, operator by operator
make         expressions built in normal form: constants folded, sums of integers collected
ranges       between which ends values lie, where computing them neither rounds nor wraps
prove        what holds for all positions (z3)
hiding       whether what is added to a score keeps its key from being seen
normal_form  an expression of the softmax input as: which keys are seen, and what becomes of a score
classify     causal, sliding, chunked, softcap, ALiBi, where they are proved; what is left is carried
"""
