"""Constants of the model that neither data sheets (`util/machines.py`) nor machine code say, with where they are from.

Upper-case names are of the architectures, from NVIDIA's documentation. What nobody publishes is a field of `Assumed`:
nothing was fitted to a measurement; how predictions compare with what an H200 took stands in docs/kernels.md.
`KIND` and `HARSH` are the ends between which each is believed to be; what is said of a goal holds where both ends and
the middle say it.
"""

from __future__ import annotations

from dataclasses import dataclass

# ---- CUDA C++ Programming Guide, "Compute Capabilities" (8.0 to 12.0)

REGISTERS = 65536  # of a multiprocessor, a quarter for each of its schedulers
REGISTER_UNIT = 256  # registers of a warp come in multiples of this
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of a warp in a clock
WARP = 32
SHARED_SYSTEM = 1024  # bytes of shared memory that each program takes besides its own
SHARED_UNIT = 128  # shared memory comes in multiples of this
SHARED_CLOCK = 128  # bytes of shared memory that a multiprocessor reads or writes in a clock: 32 banks of 4

# ---- The tuner

# A candidate that is predicted to take so many times as long as the best predicted one is not tried. Wide, because the
# model is up to a half too kind to what instructions bind.
HOPELESS = 2.0


@dataclass(frozen=True)
class Assumed:
    """What is assumed of every device.

    issued:  of the slots that schedulers have, what a loop full of work fills. Register banks, control codes and full
             queues take the rest
    alone:   clocks from an instruction of a warp to its next, where the warp has its scheduler to itself. One that
             depends on the last waits 4 (Luo et al. 2024, arXiv:2402.13499), and about every second one does
    barrier: clocks that a barrier of a program costs it: its warps come at different times
    miss:    seconds of a load that misses the L2 cache, of a memory that is not busy. Chasing pointers takes about 480
             clocks on A100 and H100 (Luo et al. 2024); the rest is translation
    hit:     of one that hits it: about 260 clocks (the same)
    busy:    how much longer a miss takes in a busy memory, before the queue for its bandwidth, which is modelled
    near:    bytes that a multiprocessor takes from the L2 cache in a clock, when all do; its port has 64
    single:  of the matrix products that a device has with warp groups, what instructions of single warps reach. 0.63 on
             Hopper (Luo et al. 2024), taken for Blackwell as well; Ampere and Ada have no others
    launch:  seconds from the last store of a kernel of a CUDA graph to the first program of the next, without
             programmatic dependent launch
    program: seconds from a free place of a multiprocessor to the first instruction of the program that takes it
    """

    issued: float = 0.85
    alone: float = 2.0
    barrier: float = 50.0
    miss: float = 0.30e-6
    hit: float = 0.16e-6
    busy: float = 1.5
    near: float = 40.0
    single: float = 0.63
    launch: float = 1.0e-6
    program: float = 0.2e-6


EXPECTED = Assumed()
KIND = Assumed(0.95, 1.5, 30.0, 0.27e-6, 0.13e-6, 1.2, 56.0, 0.7, 0.6e-6, 0.1e-6)
HARSH = Assumed(0.70, 3.0, 100.0, 0.40e-6, 0.20e-6, 2.0, 25.0, 0.5, 2.0e-6, 0.4e-6)
