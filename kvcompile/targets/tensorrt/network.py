"""An ONNX file as a TensorRT network, and what is looked at and set in it before it is built.

In place: a cache is updated where it stands exactly where the network has a KVCacheUpdate layer from a network input
to a network output. TensorRT then writes the new rows only, and wants one address bound to both. It makes that layer
of TensorScatter (linear, [batch, heads, slots, channels], fp32/fp16/bf16, fixed slots). All else that changes a cache
(ScatterND, Concat, Where) is a layer with a result of its own, whose address must be another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from kvcompile.errors import ExportError
from kvcompile.targets.tensorrt.adapter import TensorRT
from kvcompile.targets.tensorrt.locate import place_of


@dataclass(frozen=True)
class Network:
    """A parsed network and what must live as long as it.

    in_place: names of inputs and outputs that are one tensor in memory
    errors: where TensorRT's logger puts the errors to come
    """

    definition: Any
    builder: Any
    errors: list[str]
    in_place: frozenset[tuple[str, str]]
    keeps: tuple[Any, ...]


def parse(trt: TensorRT, file: Path, model: ir.Model) -> Network:
    """The network of an ONNX file, whose weights may lie beside it.

    model: the same file, for messages

    Raises:
        ExportError: the parser refuses a node: every one, with the layer it belongs to.
    """
    errors: list[str] = []
    logger = trt.logger(errors)
    builder = trt.module.Builder(logger)
    network = builder.create_network(trt.network_flags)
    parser = trt.module.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        nodes = {node.name: node for node in model.graph.all_nodes()}
        lines = []
        for number in range(parser.num_errors):
            error = parser.get_error(number)
            name, reason = error.node_name(), " ".join(error.desc().split())
            where = place_of(nodes[name]) if name in nodes else f"{name} ({error.node_operator()})"
            lines.append(f"  - {where}: {reason}")
        lines = lines or [f"  - {' '.join(line.split())}" for line in errors]
        raise ExportError(
            f"{trt.package} {trt.version} does not take {file.name}:\n" + "\n".join(lines[:8]) + "\n"
            "If the operator is the model's own, rewrite it; if it is of the cache, please report this as a bug"
        )
    _let_attention_decompose(trt, network)
    in_place = frozenset(_updates(trt, network))
    _check_updates(model, in_place)
    return Network(network, builder, errors, in_place, (logger, parser))


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(number) for number in range(network.num_layers)]


def _let_attention_decompose(trt: TensorRT, network: Any) -> None:
    """Attention of which TensorRT has no fused kernel (fp32, other head dims) becomes products and a softmax.

    Without it such a network is refused: IAttention.decomposable is off by default.
    """
    kind = getattr(trt.module.LayerType, "ATTENTION_OUTPUT", None)
    for layer in _layers(network):
        if kind is not None and layer.type == kind:
            layer.__class__ = trt.module.IAttentionOutputLayer
            layer.attention.decomposable = True


def _updates(trt: TensorRT, network: Any) -> list[tuple[str, str]]:
    kind = getattr(trt.module.LayerType, "KV_CACHE_UPDATE", None)
    found = []
    for layer in _layers(network):
        if kind is None or layer.type != kind:
            continue
        cache, result = layer.get_input(0), layer.get_output(0)
        if cache.is_network_input and result.is_network_output:
            found.append((cache.name, result.name))
    return found


def _check_updates(model: ir.Model, in_place: frozenset[tuple[str, str]]) -> None:
    """Every TensorScatter of the graph must have become a KVCacheUpdate, or a cache would be copied at each step."""
    wanted = {
        (node.inputs[0].name, node.outputs[0].name)
        for node in model.graph.all_nodes()
        if node.op_type == "TensorScatter" and node.inputs[0] is not None
    }
    missing = sorted(str(cache) for cache, result in wanted if (cache, result) not in in_place)
    if missing:
        raise ExportError(
            f"TensorRT took TensorScatter for something else than an update in place of {', '.join(missing)}: this "
            "version of TensorRT is not supported; use 10.15 or later, or TensorRT for RTX 1.7"
        )
