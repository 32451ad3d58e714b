"""PTX of plugins, ahead of time and with no GPU: what `aot_impl` hands to TensorRT.

Triton adds two arguments of its own to every kernel, addresses of scratch memory. TensorRT passes what it knows and no
more, so they are taken out of the PTX; a kernel that reads them is refused. Then Triton's own ptxas assembles the text,
so that what is handed out is known to assemble. Triton decides at its import whether it interprets, so all of this runs
in a process of its own:

    python -m kvcompile.backends.tensorrt_plugins.ptx     requests as JSON on stdin, results on stdout
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from kvcompile.backends.tensorrt_plugins.description import Plugin
from kvcompile.backends.tensorrt_plugins.wrapper import aligned, arguments, text
from kvcompile.errors import KernelError

_WARP = 32
# The driver of the engine's GPU compiles the PTX and must know its version: 8.8 is that of CUDA 12.9, the first that
# has all architectures up to sm_121. Triton would take the newest that its ptxas knows.
_PTX_VERSION = 88
_ALIGNED = [["tt.divisibility", 16]]
_ENTRY = re.compile(r"(\.visible \.entry \w+\(\n)(.*?)(\n\)\n)", re.DOTALL)


@dataclass(frozen=True)
class Ptx:
    """A plugin's kernel, compiled.

    name:      of the entry
    code:      the PTX, for sm_`arch`; `target` is what it says itself ("sm_89", "sm_90a": that one alone)
    version:   of PTX
    threads:   of a program
    shared:    bytes of shared memory of a program
    registers: of a thread, as ptxas gives them out
    """

    name: str
    code: str
    arch: int
    target: str
    version: str
    threads: int
    shared: int
    registers: int


def assembled(plugins: Iterable[Plugin], arch: int) -> list[Ptx]:
    """The PTX of each, in their order. arch: 89 for sm_89

    Raises:
        KernelError: one does not compile or assemble, or needs scratch memory, which TensorRT gives none.
    """
    asked = [
        {
            "name": plugin.name,
            "text": text(plugin),
            "types": arguments(plugin),
            "aligned": aligned(plugin),
            "arch": arch,
            "warps": plugin.num_warps,
            "stages": plugin.num_stages,
        }
        for plugin in plugins
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kvcompile.backends.tensorrt_plugins.ptx"],
        input=json.dumps(asked),
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KernelError(f"a plugin's kernel does not assemble:\n{done.stderr.strip()[-4000:]}")
    return [Ptx(**made) for made in json.loads(done.stdout.splitlines()[-1])]


def without_hidden(code: str, name: str, count: int) -> str:
    """The PTX with the entry's first `count` arguments.

    Raises:
        KernelError: it reads one of the others.
    """
    entry = _ENTRY.search(code)
    assert entry is not None, "Triton's PTX has one entry"
    params = entry[2].split(",\n")
    hidden = [param.split()[-1] for param in params[count:]]
    body = code[entry.end() :]
    for param in hidden:
        if re.search(rf"\[{re.escape(param)}(\+\d+)?\]", body):
            raise KernelError(f"{name} reads scratch memory ({param}), which TensorRT gives no plugin")
    return code[: entry.start(2)] + ",\n".join(params[:count]) + code[entry.end(2) :]


def _made(asked: dict[str, Any], folder: Path) -> Ptx:
    """In a process whose Triton compiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, types = asked["name"], asked["types"]
    path = folder / f"{name}.py"
    path.write_text(asked["text"], "utf-8")
    found = spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    places = {argument: place for place, argument in enumerate(types)}
    compiled = triton.compile(
        ASTSource(
            getattr(module, name),
            types,
            {},
            {(places[argument],): _ALIGNED for argument in asked["aligned"]},
        ),
        target=GPUTarget("cuda", asked["arch"], _WARP),
        options={
            "num_warps": asked["warps"],
            "num_stages": asked["stages"],
            "ptx_version": _PTX_VERSION,
        },
    )
    code = without_hidden(compiled.asm["ptx"], name, len(types))
    (target,) = re.findall(r"^\.target (\w+)", code, re.MULTILINE)
    (version,) = re.findall(r"^\.version (\S+)", code, re.MULTILINE)
    registers = _assembles(code, target, folder)
    threads, shared = _WARP * asked["warps"], compiled.metadata.shared
    return Ptx(name, code, asked["arch"], target, version, threads, shared, registers)


def _assembles(code: str, target: str, folder: Path) -> int:
    """Registers of a thread. Raises: KernelError, with ptxas's words."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(int(target.removeprefix("sm_").rstrip("af"))).path
    path = folder / "kernel.ptx"
    path.write_text(code, "utf-8")
    done = subprocess.run(
        [tool, "-v", f"--gpu-name={target}", path, "-o", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KernelError(f"ptxas: {done.stderr.strip()}")
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return int(registers)


def _batch() -> None:
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for asked in json.load(sys.stdin):
            try:
                made.append(asdict(_made(asked, Path(folder))))
            except Exception as error:
                print(f"{error}\n\n{asked['name']} for sm_{asked['arch']}", file=sys.stderr)
                raise SystemExit(1) from None
    print(json.dumps(made))


if __name__ == "__main__":
    _batch()
