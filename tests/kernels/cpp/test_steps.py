"""A thousand decode steps: kernels allocate nothing, their memory stays, and nothing compiles.

A kernel's library imports nothing that allocates. What it works in it asks its caller for, who keeps that: it must not
ask for more as sequences grow. The op allocates its result and nothing else.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import kvcompile
from kvcompile.kernels.cpp.attend.prefill import COLUMNS, site_of
from kvcompile.kernels.cpp.host import ops, source
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.host.source import compiled, kernel, linear_spec, text_of
from kvcompile.kernels.cpp.isa import isa
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.layouts import Paged
from tests.kernels.cpp.test_expression import Seen
from tests.kernels.cpp.test_goldens import SITES
from tests.support.models import tiny_hf

HEADS, DIMS = (4, 2), (64, 64)
QUICK = ("int8", "expression")
# Of C and C++, and the ways in which C++ asks for memory without a word: what these are called in a library.
ALLOCATES = (
    "malloc",
    "calloc",
    "realloc",
    "alloc",
    "strdup",
    "mmap",
    "brk",
    "_Zna",
    "_Znw",
    "get_temporary_buffer",
)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def imports(library: Path) -> list[str]:
    """The symbols that a library takes from others."""
    shown = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True, timeout=60
    )
    return [line.split()[-1] for line in shown.stdout.splitlines()]


def specs_of(name: str) -> list[str]:
    """Of a token, and of a prompt."""
    site = SITES[name]
    options = (COLUMNS,) if site.layout.retention.by_score else ()
    many = CppSpec("prefill", site_of(site), 9, 3, 64, 64, "float32", options)
    return [spec_of(site, (9, 3), (64, 64), "float32").to_json(), many.to_json()]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SITES]
)
def test_no_kernel_can_allocate(name: str) -> None:
    for spec in specs_of(name):
        found = imports(compiled(text_of(spec), isa()))
        assert found, "the library's symbols are read"
        assert not [symbol for symbol in found if any(word in symbol for word in ALLOCATES)], spec


@pytest.mark.optimized
@pytest.mark.parametrize("many", [False, True])
def test_no_linear_layer_can_allocate(many: bool) -> None:
    found = imports(compiled(text_of(linear_spec(torch.bfloat16, many)), isa()))
    assert not [symbol for symbol in found if any(word in symbol for word in ALLOCATES)]


def test_what_allocates_is_seen() -> None:
    """The launcher does: it keeps the memory, and makes lists of tensors."""
    found = imports(ops.launcher())
    assert any(any(word in symbol for word in ALLOCATES) for symbol in found)


# ---- what kernels ask their caller for

_TASK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, _TASK, ctypes.c_void_p)
_WORKSPACE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)


class Call(ctypes.Structure):
    """`Call` of `include/call.h`."""

    _fields_ = (
        ("tensors", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel", _PARALLEL),
        ("workspace", _WORKSPACE),
    )


class Caller:
    """Calls a kernel as the launcher does, one worker after the other; notes the bytes that it asks for."""

    def __init__(self, spec: CppSpec, threads: int) -> None:
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel(spec).address)
        self.threads, self.asked = threads, list[int]()
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.callbacks = (_PARALLEL(self._parallel), _WORKSPACE(self._workspace))

    def _parallel(self, threads: int, task: object, context: int) -> None:
        for worker in range(threads):
            task(worker, context)  # type: ignore[operator]

    def _workspace(self, size: int) -> int:
        self.asked.append(size)
        if self.memory.numel() < size + 64:
            self.memory = torch.empty(size + 64, dtype=torch.uint8)
        return -(-self.memory.data_ptr() // 64) * 64

    def __call__(self, tensors: list[Tensor | None]) -> None:
        seen = (Seen * len(tensors))()
        for one, tensor in zip(seen, tensors, strict=True):
            if tensor is not None:
                one.data, one.dims = tensor.data_ptr(), tensor.dim()
                one.size[: tensor.dim()] = tuple(tensor.shape)
                one.stride[: tensor.dim()] = tensor.stride()
        call = Call(ctypes.addressof(seen), self.threads, *self.callbacks)
        self.function(ctypes.addressof(call))


class Sequences:
    """Two sequences of a site, their caches, and what each step is given."""

    def __init__(self, name: str, limit: int) -> None:
        site = SITES[name]
        self.spec = spec_of(site, HEADS, DIMS, "float32")
        layout, mod = site.layout, site.score.mod
        pages = -(-limit // layout.placement.page_size) if isinstance(layout.placement, Paged) else 0
        self.buffers = []
        for b in layout.buffers(HEADS[1], *DIMS, torch.float32, limit):
            rows = 2 * pages if b.paged else 2
            self.buffers.append(torch.zeros((rows, *b.shape), dtype=b.dtype))
        self.table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages) if pages else None
        g = torch.Generator().manual_seed(0)
        self.qkv = [torch.randn(2, heads, 1, 64, generator=g) for heads in (HEADS[0], *HEADS[1:] * 2)]
        angles = torch.rand(limit, 64, generator=g)
        self.rope = [angles.cos(), angles.sin()] if site.rotary is not None else []
        self.sinks = torch.randn(HEADS[0], generator=g) if site.score.sinks else None
        self.bias = torch.rand(HEADS[0], generator=g) if site.score.bias is not None else None
        self.leaves = [] if mod is None else [torch.randn(8, 9, generator=g)]
        self.positions = torch.tensor([[0], [0]])

    def op(self) -> Tensor:
        """A step by the op."""
        given = (self.sinks, self.bias, self.table, None, self.leaves, 64, self.spec.to_json())
        out: Tensor = ops.cpp_attend(*self.qkv, self.buffers, self.positions, self.rope, *given)
        return out

    def tensors(self, out: Tensor) -> list[Tensor | None]:
        """A step's, as the launcher passes them."""
        rope = [*self.rope, None, None][:2]
        of_site = [self.sinks, self.bias, self.table, *rope, None, *self.leaves]
        return [out, *self.qkv, self.positions, *of_site, *self.buffers]


STEPS = 1000
STARTS = 300  # so many slots that every thread has all the pieces that it gets at any length


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["int8", "expression", "pages", "scored", "ring"])
def test_a_thousand_steps_ask_for_no_more_memory(name: str) -> None:
    ops.ready()
    own, same = (Sequences(name, STARTS + STEPS + 2) for _ in range(2))
    call, out = Caller(own.spec, 2), torch.empty(2, HEADS[0], 1, 64)
    for step in range(STARTS + STEPS):
        own.positions.fill_(step)
        call(own.tensors(out))
    assert len(call.asked) == STARTS + STEPS
    kept = max(call.asked[:STARTS]) * 3 // 2  # by the launcher, when it has to get some
    assert max(call.asked[STARTS:]) <= kept, "what is kept does not suffice"
    for step in range(3):  # and these were the steps that the op makes
        own.positions.fill_(step), same.positions.fill_(step)
        for mine, theirs in zip(own.buffers, same.buffers, strict=True):
            mine.copy_(theirs)
        call(own.tensors(out))
        assert torch.equal(out, same.op())


def test_the_op_allocates_its_result_alone() -> None:
    ops.ready()
    for name in ("int8", "expression", "pages", "scored", "ring"):
        own = Sequences(name, 400)
        for step in range(300):
            own.positions.fill_(step)
            out = own.op()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for step in range(300, 310):
                own.positions.fill_(step)
                own.op()
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        sizes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.nbytes() > 0]
        assert sizes == [out.nbytes] * 10, name


# ---- whole models


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("int8", 200),  # over three blocks of slots
        *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in ("int8", "paged", "h2o", "kivi2")),
    ],
)
def test_steps_of_a_model_compile_nothing(recipe: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a graph nor a kernel."""
    limit = {} if recipe == "h2o" else {"max_tokens": 1152}
    model = tiny_hf("llama", layers=1, head_dim=32, max_position_embeddings=2048)
    fast = kvcompile.optimize(model, recipe, verify="off", **limit)
    assert {decision.kernels for decision in fast.plan.decisions} == {"cpp"}
    token = torch.ones(1, 1, dtype=torch.int64)
    fast(input_ids=torch.arange(30)[None], logits_to_keep=1)
    for _ in range(70):  # beyond the first block of slots, and the first pages
        token = fast(input_ids=token, logits_to_keep=1).logits[:, -1:].argmax(-1)
    before = {key: dict(value) for key, value in counters.items()}
    asked: list[str] = []
    monkeypatch.setattr(source, "address_of", asked.append)
    for _ in range(steps):
        token = fast(input_ids=token, logits_to_keep=1).logits[:, -1:].argmax(-1)
    assert {key: dict(value) for key, value in counters.items()} == before and before
    assert not asked
