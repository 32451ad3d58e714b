"""What makes tests of tiny models quick, and Triton's interpreter where no GPU is asked for.

On a few shared cores, the threads of tiny models cost more than they save; so do PyTorch's cache of what operators
make of shapes, which pays where layers repeat, and collecting garbage among the objects of a whole session all the
time: together a quarter of what tests of tracing take. Triton decides at its first import whether kernels are
interpreted, and torch._dynamo imports it, so the variable is set before either; what needs the compiler runs in a
process of its own (`kernels/triton/tools/assemble.py`).

Equal models are understood once in a session (`tests/support/understood_once.py`), but in tests of what understands
them.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch


def _wants_gpu(words: list[str]) -> bool:
    """Whether a command line selects tests that need a GPU."""
    marks = [word for before, word in pairwise(words) if before == "-m"]
    marks += [word[2:] for word in words if word.startswith("-m")]
    return any("gpu" in mark.replace("not gpu", "") for mark in marks)


# Here, as files of fixtures that are imported next may import Triton; workers have the environment of who starts them.
if not (_wants_gpu(sys.argv[1:]) or "PYTEST_XDIST_WORKER" in os.environ or torch.cuda.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says something of the machine, and nothing of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# From before the first test is collected: thousands of items are made, and all of them stay.
gc.set_threshold(400_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "few(n): one case of n is quick, in turns over all parameters; the others are slow"
    )
    config.addinivalue_line("markers", "optimized: C++ kernels are compiled with the flags that users have")
    # From before the first test on, pytest listens to loggers that do not propagate; where anyone listens to this one,
    # PyTorch prints all its graphs.
    logging.getLogger("torch.__trace").propagate = True
    # For processes that tests start, too: threads of theirs only wait for cores that others compute on.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What an earlier session proved or compiled is none of a test's business: those of it switch this on.
    os.environ.setdefault("KVCOMPILE_KEEP", "off")
    # Otherwise each process that compiles has Inductor try every instruction set that the processor says it has: it
    # compiles a file for each, and loads it in a process that imports PyTorch.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # What calls an AOTInductor package's kernels is most of its C++; and nobody debugs what tests compile.
    os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")


@pytest.hookimpl(tryfirst=True)  # before fixtures of whole files
def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.support import compiled_once

    compiled_once.optimize(item.get_closest_marker("optimized") is not None)


@pytest.fixture(autouse=True, scope="session")
def _quick(tmp_path_factory: pytest.TempPathFactory) -> None:
    import torch._dynamo.config  # imports Triton: not before `pytest_configure`

    from tests.support import (
        compiled_once,
        quick_arguments,
        quick_assembling,
        quick_symbols,
        quick_tracing,
    )

    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False
    own = tmp_path_factory.getbasetemp()
    compiled_once.install((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled")
    quick_assembling.install()
    quick_tracing.install()
    quick_symbols.install()
    quick_arguments.install()
    gc.freeze()  # what was imported and collected stays: nothing looks through it again, here or in forks
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import quick_interpreter

        quick_interpreter.install()


@cache
def _name(path: Path) -> str:
    """A file of tests by its path from here, without `.py`: names alone may be the same in two folders."""
    folder = Path(__file__).parent
    return path.relative_to(folder).with_suffix("").as_posix() if path.is_relative_to(folder) else path.stem


# What looks at how models are understood. Tests that patch anything understand for themselves, too.
ANEW = [
    "passes/capture/test_capture",
    "passes/capture/test_autocast",
    "passes/capture/test_trace",
    "passes/capture/test_guards",
    "passes/capture/test_harmless",
    "coverage/test_coverage",
    "coverage/test_sizes",
    "passes/detect/test_detect",
    "report/test_dump",
    "passes/detect/test_dynamic_mask",
    "api/test_first_day",
    "passes/detect/test_forms",
    "passes/capture/test_functionalize",
    "passes/rules/test_latent",
    "runtime/test_modes",
    "passes/capture/test_opaque",
    "passes/test_table",
    "passes/rewrite/test_positions",
    "util/test_progress",
    "passes/rules/test_rope",
    "passes/score_mod/test_scores",
    "passes/detect/test_shared_kv",
    "passes/recurrent/test_state",
    "runtime/test_threads",
    "passes/capture/test_traced_once",
]


# Files whose patches are of what loads a model, decides, computes or compiles, and of nothing that understands.
OTHERS = [
    "api/test_bad_input",
    "api/test_calibrate",
    "backends/test_torch_tensorrt",
    "benchmarks/test_serving",
    "cli/test_cli",
    "cli/test_serve",
    "compile/test_kept_programs",
    "decide/test_auto",
    "decide/test_kernel_choice",
    "decide/test_one_decision",
    "decide/test_rope_on_append",
    "docs/test_docs",
    "examples/test_examples",
    "kernels/reference/test_page_selection",
    "quality/test_figures",
    "quality/test_runs",
    "runtime/test_cuda_memory",
    "runtime/test_generate",
    "runtime/test_growing",
    "runtime/test_no_sync",
    "runtime/test_pages",
    "runtime/test_saved_module",
    "serve/test_disk",
    "serve/test_engine",
    "serve/test_packed",
    "serve/test_pick",
    "serve/test_reading",
    "targets/test_artifacts",
    "targets/test_new_target",
    "verify/test_proofs",
]


# Folders whose tests need verification as users have it: they are of what it sees.
LONG = ("verify/", "soundness/", "fuzz/")
NOT_LONG = ("verify/test_proofs",)  # of what is kept of it


@pytest.fixture(autouse=True)
def _short_texts(request: pytest.FixtureRequest) -> None:
    from tests.support.short_texts import short

    name = _name(request.path)
    short(name in NOT_LONG or not name.startswith(LONG))


@pytest.fixture(autouse=True)
def _understood_once(request: pytest.FixtureRequest) -> None:
    from tests.support.understood_once import known

    known.begin()
    patches = "monkeypatch" in request.fixturenames  # what is patched must be what runs, and in no other test
    known.on = _name(request.path) not in ANEW and (not patches or _name(request.path) in OTHERS)


@pytest.fixture(autouse=True)
def _exported_once(request: pytest.FixtureRequest) -> None:

    if "kvcompile.targets.onnx.graph" not in sys.modules:
        return
    from tests.support.exported_once import AFTER, exported

    exported.begin()
    exported.on = "monkeypatch" not in request.fixturenames or _name(request.path) in AFTER


# The longest files come first, so that no worker is left alone with one of them.
LONGEST = [
    "coverage/test_coverage",
    "targets/onnx/test_session",
    "compile/test_compile",
    "api/test_smollm2",
    "kernels/triton/test_models",
    "targets/test_artifacts",
    "targets/aoti/test_session",
    "runtime/test_saved_module",
    "passes/capture/test_traced_once",
    "verify/test_verify",
    "targets/onnx/test_copies",
    "examples/test_examples",
    "serve/test_ranks",
    "runtime/parallel/test_ranks",
    "runtime/test_cuda_memory",
    "kernels/cpp/test_attention",
    "serve/test_numerics",
    "passes/score_mod/test_scores",
    "passes/recurrent/test_state",
    "kernels/reference/test_storage",
    "serve/test_packed",
    "kernels/reference/test_quanto",
]


def _places(item: pytest.Function) -> int:
    """The places of a case's parameters in their lists, added up: a step of any of them is a step of the sum."""
    case, places = max(item.callspec.indices.values()), 0
    for mark in reversed([*item.iter_markers("parametrize")]):  # the uppermost changes with every case
        case, place = divmod(case, len(mark.args[1]))
        places += place
    return places


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        few = item.get_closest_marker("few")
        if few and isinstance(item, pytest.Function) and _places(item) % few.args[0]:
            item.add_marker(pytest.mark.slow)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_name(item.path), len(order)))


# Files of the same models, which one worker understands for all of them.
TOGETHER = {
    "serve/test_packed": "serve/test_numerics",
    "serve/test_shared_bits": "serve/test_numerics",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files of `TOGETHER` go to one worker; all others as `--dist loadfile` says."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class ByModels(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            name = _name(Path(__file__).parent.parent / file)
            return TOGETHER.get(name, name)

    return ByModels(config, log)
