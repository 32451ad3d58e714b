"""The text of a plugin's kernel: a generated one, called with the arguments as TensorRT orders them.

    def append_<hash>(q_ptr, ..., tokens, ..., q_out_ptr, keys_data_kept_ptr, ...):
        append(q_ptr, 576, 64, 64, ...)

Triton puts the inner kernel into it, so nothing is called at run time.
"""

from __future__ import annotations

from kvcompile.backends.tensorrt_plugins.description import Plugin
from kvcompile.kernels.triton.params import TensorParam

_ALIGNED = 16


def arguments(plugin: Plugin) -> dict[str, str]:
    """Argument -> Triton's type of it, in the order of the plugin's kernel."""
    types = plugin.source.signature
    aliases = plugin.aliases
    pointers = {tensor.name: types[f"{tensor.name}_ptr"] for tensor in plugin.inputs}
    found = {f"{name}_ptr": kind for name, kind in pointers.items()}
    found |= {name: "i32" for name, _ in plugin.scalars}
    for tensor in plugin.outputs:
        found[f"{tensor.name}_ptr"] = types[f"{aliases.get(tensor.name, tensor.name)}_ptr"]
    return found


def aligned(plugin: Plugin) -> tuple[str, ...]:
    """The arguments that are multiples of 16: addresses, as TensorRT's are of 256, and what the sizes say is one."""
    addresses = [name for name in arguments(plugin) if name.endswith("_ptr")]
    numbers = [name for name, value in plugin.scalars if value.as_coeff_Mul()[0] % _ALIGNED == 0]
    return (*addresses, *numbers)


def text(plugin: Plugin) -> str:
    """The module: the generated kernel, and the plugin's."""
    source = plugin.source
    written = {target: name for name, target in plugin.aliases.items()}
    known = dict(plugin.constants)
    passed: list[str] = []
    for param in source.params:
        names = param.names
        if isinstance(param, TensorParam):
            passed.append(f"{written.get(param.name, param.name)}_ptr")
            names = names[1:]
        passed += [repr(known[name]) if name in known else name for name in names]
    taken = ",\n    ".join(arguments(plugin))
    given = ",\n        ".join(passed)
    return (
        f"{source.text}\n\n"
        f"@triton.jit\ndef {plugin.name}(\n    {taken},\n):\n"
        f'    """{source.name}, with inputs, sizes, then outputs."""\n'
        f"    {source.name}(\n        {given},\n    )\n"
    )
