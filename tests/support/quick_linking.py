"""What Inductor compiles is linked without reading the symbols of PyTorch's largest library: the same library, sooner.

The linker reads all names of `libtorch_cpu` for each of hundreds of tiny kernels, a third of what a compilation takes.
A shared library may leave names open, and the loader looks for them in the libraries that it names: so a library of no
names stands there in its place, with its `soname`, and is named by whatever is linked. Programs are linked as ever.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NAME = "torch_cpu"
SCRIPT = """\
#!/bin/sh
for word; do [ "$word" = -shared ] && shared=1; done
if [ "$shared" ]; then
    for word; do
        shift
        if [ "$word" = -l{name} ]; then
            set -- "$@" --push-state --no-as-needed '{library}' --pop-state
        else
            set -- "$@" "$word"
        fi
    done
fi
exec '{linker}' "$@"
"""


def install(folder: Path) -> bool:
    """For this process and all that it starts; False: there is no GNU linker, and all is linked as ever."""
    linker, compiler = shutil.which("ld"), shutil.which("g++")
    if linker is None or compiler is None or not _is_gnu(linker):
        return False
    folder.mkdir()
    library = folder / f"lib{NAME}.so"
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-x", "c++", os.devnull]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=60)
    script = folder / "ld"
    script.write_text(SCRIPT.format(name=NAME, library=library, linker=linker))
    script.chmod(0o755)
    os.environ["COMPILER_PATH"] = os.pathsep.join(
        filter(None, (str(folder), os.environ.get("COMPILER_PATH")))
    )
    return True


def _is_gnu(linker: str) -> bool:
    said = subprocess.run([linker, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return said.stdout.startswith("GNU ld")
