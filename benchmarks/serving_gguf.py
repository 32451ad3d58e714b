"""A .gguf file with the same weights in float32: what others' engines read where ours has float32, too.

It runs in an environment of its own or in ours, with `gguf` and numpy: `<from.gguf> <to.gguf> [F16]`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, target: Path, half: bool = False) -> None:
    """Write `target`, with the tensors of `source` as float32 or float16 and all else as it is."""
    import gguf
    import numpy

    reader = gguf.GGUFReader(source)
    kinds = gguf.LlamaFileType
    kind = kinds.MOSTLY_F16 if half else kinds.ALL_F32
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue
        value = int(kind) if name == gguf.Keys.General.FILE_TYPE else field.contents()
        inner = field.types[1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        writer.add_tensor(tensor.name, data.astype(numpy.float16) if half and data.ndim > 1 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), "F16" in sys.argv[3:])
