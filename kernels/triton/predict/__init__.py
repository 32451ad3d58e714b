"""Predicts how long generated kernels take on a GPU that is not there, from their machine code and their shapes.

    a call -> its launches (recorded.py) -> facts of each kernel (facts.py), and what its programs do (work.py)
           -> what a turn costs (turn.py, pipes.py) -> programs on places (occupancy.py, skew.py) -> seconds (launch.py)

| file | rule |
|---|---|
| `assumptions.py` | every constant that no data sheet and no machine code says |
| `model.py` | a device, and what is assumed of it |
| `recorded.py` | which launches a call makes, with their grids |
| `facts.py` | what the machine code of a kernel says, kept in the user's cache |
| `occupancy.py` | programs that a multiprocessor holds |
| `pipes.py` | what an instruction takes of a multiprocessor |
| `memory.py` | bytes that a launch moves |
| `work.py` | which turns each program makes |
| `turn.py` | how fast programs that share a multiprocessor make their turns |
| `skew.py` | programs over places: waves, tails, unequal lengths |
| `launch.py` | one launch: seconds, and what they go to |
| `linears.py`, `step.py` | linear layers of one token, and a whole decode step of a model |
| `cases.py`, `goals.py` | the cases that benchmarks measure, and the goals that are made of them |
| `prior.py` | in which order a tuner tries candidates, and which it leaves out |

Nothing here was ever compared with a measurement of these kernels (docs/kernels.md says with what it was compared).
"""
