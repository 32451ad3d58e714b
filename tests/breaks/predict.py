"""Breaks of what is read of generated kernels without a GPU: machine code, TTGIR, and predicted times."""

from __future__ import annotations

from tests.breaks.broken import broken

PREDICT = (
    broken(
        "a descriptor's constant may be added to anything",
        "kernels/triton/tools/descriptors.py",
        'return next((said for part in named if (said := _traced(code, place, part, _SMALL))), "")',
        'return ""',
        "tests/kernels/triton/tools/test_descriptors.py",
    ),
    broken(
        "the buffers of a pipeline are those of its largest array",
        "kernels/triton/tools/ttgir.py",
        "min((arrays[name] for name in used), default=0)",
        "max((arrays[name] for name in used), default=0)",
        "tests/kernels/triton/tools/test_ttgir.py",
    ),
    broken(
        "arrays of barriers count as buffers of a pipeline",
        "kernels/triton/tools/ttgir.py",
        "for name in _BARRIER.findall(line) if name in views}",
        "for name in _BARRIER.findall(line) if name in arrays}",
        "tests/kernels/triton/tools/test_ttgir.py",
    ),
    broken(
        "predicted: copies that are waited for are on their way",
        "kernels/triton/predict/launch.py",
        "lines is not None and lines.wait and lines.buffers > 1",
        "lines is not None and lines.buffers > 1",
        "tests/kernels/triton/predict/test_launch.py",
    ),
    broken(
        "predicted: loads that are waited for cost nothing",
        "kernels/triton/predict/launch.py",
        "waits = miss + (lines.sync_loads - 1) * assumed.hit",
        "waits = 0.0",
        "tests/kernels/triton/predict/test_launch.py",
    ),
    broken(
        "predicted: registers come one by one",
        "kernels/triton/predict/occupancy.py",
        "_up(max(registers, 1) * a.WARP, a.REGISTER_UNIT)",
        "max(registers, 1) * a.WARP",
        "tests/kernels/triton/predict/test_occupancy.py",
    ),
    broken(
        "predicted: each program has all of the bandwidth",
        "kernels/triton/predict/turn.py",
        "turn.bytes * active / beside / model.machine.copied",
        "turn.bytes / model.machine.copied",
        "tests/kernels/triton/predict/test_turn.py",
    ),
    broken(
        "predicted: a place that becomes free stays empty",
        "kernels/triton/predict/skew.py",
        "elif self.waiting:",
        "elif not self.waiting:",
        "tests/kernels/triton/predict/test_skew.py",
    ),
    broken(
        "predicted: each split reads from the beginning",
        "kernels/triton/predict/work.py",
        "min(share, count - split * share)",
        "min(share, count)",
        "tests/kernels/triton/predict/test_launch.py",
    ),
    broken(
        "predicted: facts outlive the compiler",
        "kernels/triton/predict/facts.py",
        'version("triton"), _readers()',
        "_readers()",
        "tests/kernels/triton/predict/test_facts.py",
    ),
    broken(
        "predicted: nothing is hopeless",
        "kernels/triton/predict/prior.py",
        "self.seconds[one] < times * least",
        "self.seconds[one] >= least",
        "tests/kernels/triton/predict/test_prior.py",
    ),
    broken(
        "predicted: a goal is met where it is at one end",
        "kernels/triton/predict/goals.py",
        'return "open" if len(met) > 1 else "met" if met == {True}',
        'return "met" if True in met',
        "tests/cli/test_predict.py::test_goals",
    ),
    broken(
        "predicted: common tiles are read by each sequence",
        "kernels/triton/predict/work.py",
        "found += [*first, count - common if several else count] * heads",
        "found += [*first, count] * heads",
        "tests/kernels/triton/predict/test_launch.py",
    ),
    broken(
        "loads by a path that is not coherent are no matter",
        "kernels/triton/tools/ptx.py",
        'return "a load that is not coherent"',
        'return ""',
        "tests/kernels/triton/tools/test_ptx.py",
    ),
)
