"""What TensorRT does not take, by node of an ONNX graph: checked before a build, which would say it later, and worse.

Every rule was seen as a refusal of TensorRT for RTX 1.7.1 (tests/targets/tensorrt/test_capabilities.py builds them);
the enterprise TensorRT 10.15 shares its parser. The graphs that kvcompile writes break none of the first group: they
are traced under `kernels.shared.dialect.TENSORRT`. What is left to break them is the model's own code, and the GPU.

| rule | in the graph | refused because |
|---|---|---|
| bits | BitwiseAnd/Or/Xor/Not, BitShift | no operator |
| bytes | a uint8 tensor that is neither input nor constant | no such intermediate |
| small-floats | fp8 and int4 anywhere but between Q/DQ nodes | no arithmetic, no indexing |
| topk | TopK of more than 3,840 | the kernel's limit |
| softcap | Attention with softcap | no such attribute |
| attention-outputs | Attention with more than one output | caches are tensors of their own here |
| scatter-reduction | ScatterND with a reduction | no such kernel |
| no-operator | NonZero, Unique, DynamicQuantizeLinear, sequences, ... | no operator, or a plugin that is not there |
| cache-update | TensorScatter but linear, 4-D, fp32/fp16/bf16, fixed slots, input to output | limits of KVCacheUpdate |
| turing-bf16 | bf16 with SM75 among the targets | no such arithmetic on that GPU |
| turing-fp32 | MatMul in fp32 with SM75 among the targets | no such kernel |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from kvcompile.errors import ExportError
from kvcompile.targets.tensorrt.locate import place_of

MAX_TOPK = 3840
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SMALL = (
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E5M2,
    ir.DataType.INT4,
    ir.DataType.UINT4,
)
_AROUND_SMALL = ("QuantizeLinear", "DequantizeLinear", "Concat", "Reshape", "Identity", "Constant", "Shape")
_NONE = frozenset(
    {
        "NonZero", "Unique", "DynamicQuantizeLinear", "GroupQueryAttention", "SplitToSequence", "SequenceAt",
        "SequenceConstruct", "ConcatFromSequence", "Bernoulli", "Multinomial", "Det", "MatMulInteger", "ConvInteger",
        "StringNormalizer", "TfIdfVectorizer", "Optional", "OptionalGetElement", "CenterCropPad", "Col2Im",
        "Compress", "BitCast", "SequenceEmpty", "SequenceInsert", "SequenceLength", "DFT", "QLinearMatMul",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """
    breaks: what of a node breaks it, given the targets ("SM75", ...); None: nothing does
    instead: what to do
    """

    name: str
    breaks: Callable[[ir.Node, Sequence[str]], str | None]
    instead: str


def _bits(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type == "BitShift" or node.op_type.startswith("Bitwise"):
        return f"TensorRT has no {node.op_type}"
    return None


def _bytes(node: ir.Node, targets: Sequence[str]) -> str | None:
    if any(value.dtype == ir.DataType.UINT8 for value in node.outputs):
        return "its result is uint8, which TensorRT has as inputs and constants only"
    if node.op_type != "Cast" and any(v is not None and v.dtype == ir.DataType.UINT8 for v in node.inputs):
        return "it takes uint8, of which TensorRT knows no operation but Cast"
    return None


def _small_floats(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type in _AROUND_SMALL:
        return None
    small = next((v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in _SMALL), None)
    if small is None or small.dtype is None:
        return None
    return f"{small.name} is {small.dtype.name.lower()}, which only QuantizeLinear makes and DequantizeLinear takes"


def _topk(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type != "TopK" or node.inputs[1] is None:
        return None
    count = node.inputs[1].const_value
    if count is not None and int(count.numpy().max()) > MAX_TOPK:
        return f"its K is {int(count.numpy().max()):,}, and TensorRT sorts at most {MAX_TOPK:,}"
    return None


def _softcap(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type == "Attention" and node.attributes.get_float("softcap"):
        return "TensorRT's attention has no softcap"
    return None


def _attention_outputs(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type == "Attention" and sum(bool(value.name) for value in node.outputs) > 1:
        return "TensorRT's attention has one output: no present keys and values, no scores"
    return None


def _scatter_reduction(node: ir.Node, targets: Sequence[str]) -> str | None:
    reduction = node.attributes.get_string("reduction", "none")
    if node.op_type == "ScatterND" and reduction != "none":
        return f"TensorRT scatters without a reduction, and this one has {reduction!r}"
    return None


def _no_operator(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type in _NONE:
        return f"TensorRT has no {node.op_type}"
    return None


def _cache_update(node: ir.Node, targets: Sequence[str]) -> str | None:
    if node.op_type != "TensorScatter":
        return None
    cache, result = node.inputs[0], node.outputs[0]
    assert cache is not None
    shape = cache.shape
    if node.attributes.get_string("mode", "linear") != "linear":
        return "KVCacheUpdate knows no ring (mode circular)"
    if cache.dtype not in _FLOATS:
        dtype = "an unknown dtype" if cache.dtype is None else cache.dtype.name.lower()
        return f"KVCacheUpdate takes fp32, fp16 and bf16, not {dtype}"
    if shape is None or len(shape) != 4 or node.attributes.get_int("axis", -2) not in (-2, 2):
        return "KVCacheUpdate takes [batch, heads, slots, channels]"
    if not shape.is_static(2):
        return "KVCacheUpdate takes a fixed number of slots"
    if not cache.is_graph_input():
        return f"KVCacheUpdate must take its cache from outside, and {cache.name} is computed"
    if not result.is_graph_output():
        return f"the result of KVCacheUpdate must be an output, and {result.name} is none"
    return None


def _turing_bf16(node: ir.Node, targets: Sequence[str]) -> str | None:
    if "SM75" not in targets:
        return None
    if any(v is not None and v.dtype == ir.DataType.BFLOAT16 for v in (*node.inputs, *node.outputs)):
        return "SM75 has no bf16"
    return None


def _turing_fp32(node: ir.Node, targets: Sequence[str]) -> str | None:
    if "SM75" not in targets or node.op_type not in ("MatMul", "Gemm", "Attention"):
        return None
    if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT:
        return "TensorRT has no product of fp32 matrices for SM75"
    return None


_PORTABLE = "say it by quotients and remainders of int32 or fp32 numbers"
_OTHER_TARGET = "leave SM75 out of compute_capabilities"
RULES: tuple[Rule, ...] = (
    Rule("bits", _bits, f"{_PORTABLE} (kvcompile's own graphs do)"),
    Rule("bytes", _bytes, "keep bytes as int8, compute in int32 or fp32"),
    Rule(
        "small-floats",
        _small_floats,
        "keep their codes as int8 (kvcompile's own caches do), or use dtype int8",
    ),
    Rule("topk", _topk, "a smaller K, or places by counting (kvcompile's retention by scores does)"),
    Rule("softcap", _softcap, "spell the attention out as products and a softmax"),
    Rule("attention-outputs", _attention_outputs, "keep caches as inputs and outputs of the graph"),
    Rule("scatter-reduction", _scatter_reduction, "sum before scattering"),
    Rule(
        "no-operator", _no_operator, "rewrite the model without it, or export to ONNX Runtime (target: onnx)"
    ),
    Rule("cache-update", _cache_update, "write this cache by ScatterND"),
    Rule("turing-bf16", _turing_bf16, f"load the model in float16, or {_OTHER_TARGET}"),
    Rule(
        "turing-fp32",
        _turing_fp32,
        f"{_OTHER_TARGET}, or choose a layout without fp32 products (docs/tensorrt.md)",
    ),
)
_SHOWN = 8


def problems(model: ir.Model, targets: Sequence[str] = ()) -> list[str]:
    """What of `model` TensorRT refuses, a line for each rule and place, with what to do instead."""
    found: dict[tuple[str, str], list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        for rule in RULES:
            detail = rule.breaks(node, targets)
            if detail is not None:
                found.setdefault((rule.name, detail), []).append(node)
    instead = {rule.name: rule.instead for rule in RULES}
    lines = []
    for (name, detail), nodes in found.items():
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        lines.append(f"{place_of(nodes[0])}{more}: {detail}; {instead[name]} [{name}]")
    return lines


def check(model: ir.Model, targets: Sequence[str], what: str) -> None:
    """Refuse a graph that TensorRT would; what: of which graph, for the message.

    Raises:
        ExportError: every problem, with its node, its layer and what to do.
    """
    found = problems(model, targets)
    if not found:
        return
    shown = [f"  - {line}" for line in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"  - and {len(found) - _SHOWN} more")
    raise ExportError(f"TensorRT cannot hold {what}:\n" + "\n".join(shown))
