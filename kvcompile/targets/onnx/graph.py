"""A traced function as an ONNX model whose inputs and outputs have the names of the manifest.

The exporter is PyTorch's own (`torch.onnx.export` of an ExportedProgram, opset 24, strongly typed). What is added here
are names, dynamic sizes, metadata, and the weights' file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from kvcompile.errors import ExportError
from kvcompile.passes.capture.traced_once import NotOnce
from kvcompile.targets.functional import Functional, Phase, traced
from kvcompile.targets.manifest import Graph, TensorInfo, dtype_name
from kvcompile.targets.onnx import copies
from kvcompile.targets.onnx.aliases import aliases
from kvcompile.targets.onnx.copies import expand
from kvcompile.targets.onnx.decompose import node_by_node
from kvcompile.targets.onnx.simplify import simplify
from kvcompile.targets.onnx.translate import translations
from kvcompile.targets.onnx.weights import WeightFile
from kvcompile.util.tracing import quiet, uncollected

log = logging.getLogger(__name__)
OPSET = 24
OPSETS = (23, 24)


def emit(
    function: Functional,
    phase: Phase,
    folder: Path,
    weights: WeightFile,
    metadata: Mapping[str, str],
    *,
    opset: int = OPSET,
) -> Graph:
    """Write `{phase}.onnx` of a function to `folder`, its weights to `weights`; what the manifest says of it.

    Args:
        metadata: what the model's metadata_props say of where it comes from.

    Raises:
        ExportError: the graph cannot be traced, or has an operator without a translation.
    """
    one = phase == "decode"
    model = _model(function, one, opset)
    arguments = function.arguments(one)
    outputs = ("logits", *(f"{name}_out" for name in function.caches))
    sizes = _named_sizes(model, [argument.shape for argument in arguments])
    for value, name in zip(model.graph.inputs, [a.name for a in arguments], strict=True):
        _rename(model, value, name)
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        _rename(model, value, name)
    vocab = _sizes_of(model.graph.outputs[0])[-1]
    assert isinstance(vocab, int)
    kept = arguments[3].shape[0]
    infos = [
        TensorInfo(
            name="logits", role="logits", dtype=_dtype(model.graph.outputs[0]), shape=("batch", kept, vocab)
        )
    ]
    given = {argument.name: argument for argument in arguments}
    for name in function.caches:
        argument = given[name]
        infos.append(
            TensorInfo(
                name=f"{name}_out", role="cache", dtype=dtype_name(argument.dtype), shape=argument.shape
            )
        )
    for value, info in zip(model.graph.outputs, infos, strict=True):
        value.shape = ir.Shape(info.shape)
    _say_sizes(model, sizes)
    model.producer_name = "kvcompile"
    model.metadata_props.update({**metadata, "kvcompile.phase": phase})
    model.graph.name = f"kvcompile_{phase}"
    pairs = aliases(model, function.caches, outputs[1:])
    weights.move(model)
    file = f"{phase}.onnx"
    ir.save(model, folder / file)
    return Graph(
        phase=phase,
        file=file,
        inputs=tuple(
            TensorInfo(name=a.name, role=a.role, dtype=dtype_name(a.dtype), shape=a.shape) for a in arguments
        ),
        outputs=tuple(infos),
        aliases=pairs,
    )


def _model(function: Functional, one: bool, opset: int) -> ir.Model:
    """The function in ONNX, of which equal regions are translated once where that can be."""
    digest = function.plan.digest()
    function.once = function.arguments(one)
    try:
        model = _translated(traced(function, one), opset, digest)
        expand(model)
        return model
    except (ExportError, NotOnce) as error:
        log.info("equal regions are not translated once: %s", error)
    finally:
        function.once = ()
    return _translated(traced(function, one), opset, digest)


def _translated(program: ExportedProgram, opset: int, digest: str) -> ir.Model:
    try:
        with uncollected(), quiet("torch.onnx", "onnxscript", "onnx_ir"), node_by_node():
            exported = torch.onnx.export(
                program,
                (),
                opset_version=opset,
                dynamo=True,
                verbose=False,
                optimize=False,
                custom_translation_table={**translations(opset), **copies.translations()},
            )
            assert exported is not None
            model: ir.Model = exported.model
            simplify(model)
    except Exception as error:  # the exporter raises many kinds, with a report of several pages
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:600]
        raise ExportError(
            f"torch.onnx refused the graph of plan {digest}: {type(cause).__name__}: {reason}"
        ) from error
    _with_lost_constants(model)
    return model


def _with_lost_constants(model: ir.Model) -> None:
    """Constants that the optimizer (onnxscript 0.7) made and did not note among the graph's initializers."""
    for node in model.graph:
        for value in node.inputs:
            if value is None or value.producer() is not None or value.is_graph_input():
                continue
            if value.const_value is not None and value.name not in model.graph.initializers:
                model.graph.register_initializer(value)


def _rename(model: ir.Model, value: ir.Value, name: str) -> None:
    """Give `value` its name; another that has it gets a new one."""
    if value.name == name:
        return
    for node in model.graph:
        for output in node.outputs:
            if output.name == name:
                output.name = f"{name}_0"
    value.name = name


def _named_sizes(model: ir.Model, shapes: list[tuple[int | str, ...]]) -> dict[str, str]:
    """Our name of each dynamic size by the exporter's, from the inputs' shapes; they get ours."""
    sizes: dict[str, str] = {}
    for value, shape in zip(model.graph.inputs, shapes, strict=True):
        for found, name in zip(_sizes_of(value), shape, strict=True):
            if isinstance(name, str) and isinstance(found, str):
                sizes[found] = name
        value.shape = ir.Shape(shape)
    return sizes


def _say_sizes(model: ir.Model, sizes: Mapping[str, str]) -> None:
    """Inner values whose size is an expression get none: the exporter's names of it mean nothing outside."""
    for node in model.graph:
        for value in node.outputs:
            if value.shape is None or value.is_graph_output():
                continue
            value.shape = ir.Shape(
                [size if isinstance(size, int) else sizes.get(str(size)) for size in _sizes_of(value)]
            )


def _sizes_of(value: ir.Value) -> list[int | str | None]:
    assert value.shape is not None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def _dtype(value: ir.Value) -> str:
    assert value.dtype is not None
    return {
        ir.DataType.FLOAT: "float32",
        ir.DataType.FLOAT16: "float16",
        ir.DataType.BFLOAT16: "bfloat16",
    }[value.dtype]
