"""The elements of a tile: the lines that load a side's stored vectors and make them what products take.

    floats               one load a piece
    fp8, int8, 4, 2 bits, to float16    words of two bytes, each of which several pieces are in (`TileLoader.words`)
    3 bits, and where products are in float32    a load for each byte that holds channels, then shifts
                         (`kernels/reference/packing.py`)

A register of a product has two numbers of float16: of two channels of a key, or of one channel of two values. Words of
two bytes come into registers in pairs just so (values transposed by `ldmatrix`), and a mask and a difference make of
the codes at a bit of both words a register that is ready; of codes that need not be integers there, the mask alone
(`TileLoader.subnormal`). Of single bytes, values would be gathered one by one.

Where scales multiply elements (`TileLoader.by_element`), every one is dequantized: code * scale + minimum in float32.
"""

from __future__ import annotations

from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.channel_blocks import PLANES, ChannelBlock
from kvcompile.kernels.triton.tile.code_values import codebook_number, scale_number
from kvcompile.kernels.triton.tile.tile_loader import MANTISSA, TileLoader


def loaded(part: TileLoader, source: SlotArray, masked: bool) -> list[str]:
    """Lines that define a block `k0`, `k1`, ... [BLOCK_N, W] (or `v0`, ...) of each piece, in `dot`."""
    lines: list[str] = []
    there: dict[str, str] = {}  # bytes that a piece has loaded already -> the block that holds them
    for index in range(len(part.pieces)):
        lines += _piece(part, source, index, masked, there)
        if part.once:
            lines.append(f"{part.letter}{index} = made_once({part.letter}{index})")
    return lines


def _piece(part: TileLoader, source: SlotArray, index: int, masked: bool, there: dict[str, str]) -> list[str]:
    """Lines that define piece `index`."""
    piece, name = part.pieces[index], f"{part.letter}{index}"
    if part.words:
        return _of_words(part, source, index, masked, there)
    if _spreads(part, piece):
        return _halves(part, source, piece, index, masked, there)
    lines = _codes(part, source, piece, index, masked, there)
    if part.by_element:
        return lines + _dequantized(part, source, index, masked)
    return [*lines, f"{name} = {_to_dot(part, name, index)}"]


def _bits(part: TileLoader) -> int:
    """Bits of a code that is packed with others; 8: elements are bytes or wider."""
    return part.storage.element.bits if part.storage.element.packed else 8


def _spreads(part: TileLoader, piece: ChannelBlock) -> bool:
    """Whether inline assembly makes float16 of the piece's bits, as it does where all are shifted alike."""
    bits, kind = _bits(part), part.storage.element.kind
    return (
        part.assembly
        and not part.by_element
        and kind == "uint"
        and bits in (2, 4)
        and _alike(piece, part.dim * bits // 8)
    )


def _alike(piece: ChannelBlock, size: int) -> bool:
    """Whether all channels of a piece have the same shift in a plane of `size` bytes."""
    return piece.step == 1 and piece.start // size == (piece.stop - 1) // size


def _codes(
    part: TileLoader, source: SlotArray, piece: ChannelBlock, index: int, masked: bool, there: dict[str, str]
) -> list[str]:
    """Lines that define the piece as it is stored: floats, or codes as uint8."""
    name, data, c = f"{part.letter}{index}", f"{part.side}_data", part.channels(index)
    bits = _bits(part)
    if bits == 8:
        guard = part.guard(index, masked, "0" if part.integers else "0.0")
        return [f"{name} = tl.load({source.rows(data, part.dim, c, part.group)}{guard})"]
    lines, terms = [], []
    row, before, low = part.dim * bits // 8, 0, 0
    for width in PLANES[bits]:
        size = part.dim * width // 8
        if _alike(piece, size):
            first, shift = before + piece.start % size, str(piece.start // size * width)
            own = f"({c} - {piece.start - first})" if first != piece.start else c
            known = f"{piece.width} bytes from {first}"
        else:
            own = f"({c} % {size}" + (f" + {before})" if before else ")")
            shift, known = f"({c} // {size} * {width})", f"{index} of plane {before}"
        if known not in there:
            there[known] = f"{part.letter}_bytes{len(there)}"
            at = source.rows(data, row, own, part.group)
            lines.append(f"{there[known]} = tl.load({at}{part.guard(index, masked, '0')})")
        term = there[known] if shift == "0" else f"({there[known]} >> {shift})"
        term = f"({term} & {2**width - 1})"
        terms.append(term if not low else f"({term} << {low})")
        before, low = before + size, low + width
    return [*lines, f"{name} = {' | '.join(terms)}"]


def _of_words(
    part: TileLoader, source: SlotArray, index: int, masked: bool, there: dict[str, str]
) -> list[str]:
    """Lines that define a piece of codes as float16: pieces that are in the same words share their load."""
    piece, name, lines = part.pieces[index], f"{part.letter}{index}", []
    first, bit = part.word(index)
    known = f"{piece.width} words from {first}"
    if known not in there:
        there[known] = f"{part.letter}_words{len(there)}"
        place = f"{part.letter}w{index}"
        at = source.rows(f"{part.side}_data", part.row_bytes // 2, place, part.group, words=True)
        parts = ["inside[:, None]"] if masked else []
        parts += [] if piece.whole else [f"({place} < {first + piece.width})"]
        guard = f", mask={' & '.join(parts)}, other=0" if parts else ""
        lines.append(f"{there[known]} = tl.load({at}{guard})")
    codes = _of_bit(part, there[known], bit)
    if not part.affine:
        return [*lines, f"{name} = {codes}"]
    lines += part.pair_scales(source, index, masked)
    shared = part.by_group or part.assembly
    letter, own = part.letter, index - 1 if shared and piece.start % 2 else index
    numbers = f"{letter}_scale{own}, {letter}_minimum{own}"
    if part.assembly:
        form = "affine" if part.by_group else f"affine_at{piece.start % 2}"
        return [*lines, f"{name} = {form}({codes}, {numbers})"]
    scale, minimum = (f"{number}.to(tl.float32)" for number in numbers.split(", "))
    return [*lines, f"{name} = ({codes}.to(tl.float32) * {scale} + {minimum}).to(tl.float16)"]


def _of_bit(part: TileLoader, words: str, bit: int) -> str:
    """The codes that stand from `bit` on in `words`, as float16."""
    code = part.storage.element
    form = {"int": "int8", "uint": "uint8" if code.bits == 8 else f"bits{code.bits}"}.get(code.kind, "")
    if code.kind == "fp8":
        form = f"fp8_{code.name}" if part.fp8 == "bits" or code.name == "e5m2" else f"native_{code.name}"
    if part.subnormal:
        return _subnormal(part, words, bit)
    if part.assembly:
        return f"{form}_at{bit}_halves({words})"
    plain = f"({words} >> {bit})" if bit else words
    plain = f"({plain} & {2**code.bits - 1})"
    if code.kind == "fp8":
        return f"fp8_{code.name}_bits({plain}.to(tl.uint8))"
    return f"{plain}.to(tl.int8).to(tl.float16)" if code.kind == "int" else f"{plain}.to(tl.float16)"


def _subnormal(part: TileLoader, words: str, bit: int) -> str:
    """The codes that stand from `bit` on in `words`, as the subnormal numbers that they are there."""
    bits = part.storage.element.bits
    if part.from_lowest:
        if part.assembly:
            return f"int8_at{bit}_subnormals({words})"
        word = f"({words} >> {bit})" if bit else words
        return f"(({word} & 255) ^ 128).to(tl.float16, bitcast=True)"
    if part.assembly:
        return f"bits{bits}_at{bit}_subnormals({words})"
    shift = 0 if bit + bits <= MANTISSA else 8
    word = f"({words} >> {shift})" if shift else words
    return f"({word} & {(2**bits - 1) << (bit - shift)}).to(tl.float16, bitcast=True)"


def _halves(
    part: TileLoader, source: SlotArray, piece: ChannelBlock, index: int, masked: bool, there: dict[str, str]
) -> list[str]:
    """Lines that define a piece of 2 or 4 bits as float16: pieces that share bytes share what spreads them."""
    bits, c = _bits(part), part.channels(index)
    row = part.dim * bits // 8
    first, shift = piece.start % row, piece.start // row * bits
    known, lines = f"{piece.width} bytes from {first}", []
    if known not in there:
        there[known] = f"{part.letter}_bytes{len(there)}"
        own = f"({c} - {piece.start - first})" if first != piece.start else c
        at = source.rows(f"{part.side}_data", row, own, part.group)
        lines.append(f"{there[known]} = halfwords(tl.load({at}{part.guard(index, masked, '0')}))")
    form = "subnormals" if part.subnormal else "halves"
    return [*lines, f"{part.letter}{index} = bits{bits}_at{shift}_{form}({there[known]})"]


def _to_dot(part: TileLoader, name: str, index: int) -> str:
    """The stored block `name` of piece `index` as numbers in `dot`."""
    kind, code = f"tl.{part.dot}", part.storage.element
    if part.subnormal:
        return f"({name}.to(tl.uint16) << {part.bit(index)}).to(tl.float16, bitcast=True)"
    if code.kind == "codebook":
        return f"{codebook_number(code, name)}.to({kind})"
    if part.assembly and code.kind == "int":
        return f"int8_halves({name})"
    if part.assembly and code.name == "uint8":
        return f"uint8_halves({name})"
    if code.kind == "fp8" and part.fp8 == "bits":
        form = f"fp8_{code.name}"
        return f"{form}_halves({name})" if part.assembly else f"{form}_bits({name}).to({kind})"
    if code.dtype is None and part.dot == part.model:
        return name
    if part.integers and code.kind != "int" and part.dot == "float16":
        # An integer below 1024 in the mantissa of 1024: two instructions, and no conversion.
        return f"(({name}.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0)"
    return f"{name}.to({kind})"


def _dequantized(part: TileLoader, source: SlotArray, index: int, masked: bool) -> list[str]:
    """Lines that make the stored block of piece `index` what it stands for, in `dot`."""
    name, c, kept = f"{part.letter}{index}", part.channels(index), part.storage
    code = kept.element
    if code.kind == "codebook":
        wide = f"{codebook_number(code, name)}.to(tl.float32)"
    else:
        plain = f"fp8_{code.name}_bits({name})" if code.kind == "fp8" and part.fp8 == "bits" else name
        wide = f"{plain}.to(tl.float32)"
    guard = part.guard(index, masked)
    rows_guard = ", mask=inside, other=0.0" if masked else ""
    lines = []
    minimum = f" + {part.letter}_minimum" if kept.scale.minimum else ""
    match kept.scale.per:
        case "channel":
            alike = part.once and part.group % part.block_n == 0 and not source.gathers
            if alike:
                # One row for all of the tile, which is not written where none of its tokens is read of slots.
                own = ["(tl.max(inside[:, None].to(tl.int32), 0)[None, :] > 0)"] if masked else []
                own += [] if part.pieces[index].whole else [part.real(index)]
                guard = f", mask={' & '.join(own)}, other=0.0" if own else ""
            for number in kept.scale.numbers:
                at = source.shared(f"{part.side}_{number}", part.group, part.dim, c, alike=alike)
                lines.append(f"{part.letter}_{number} = {scale_number(kept.scale, f'tl.load({at}{guard})')}")
            wide = f"({wide} * {part.letter}_scale{minimum})"
        case "group":
            count, piece = kept.groups(part.dim), part.pieces[index]
            size = part.dim // count
            covered = piece.width // size
            # A number for each group of the piece, if it has whole groups; else for each channel.
            grouped = part.once and piece.whole and piece.start % size == piece.width % size == 0
            places = (
                f"{piece.start // size} + tl.arange(0, {covered})[None, :]" if grouped else f"{c} // {size}"
            )
            if grouped:
                guard = ", mask=inside[:, None], other=0.0" if masked else ""
            for number in kept.scale.numbers:
                name_of = f"{part.letter}_{number}"
                at = source.rows(f"{part.side}_{number}", count, places)
                lines.append(f"{name_of} = {scale_number(kept.scale, f'tl.load({at}{guard})')}")
                if grouped:
                    whole = f"tl.broadcast_to({name_of}[:, :, None], [{part.block_n}, {covered}, {size}])"
                    lines.append(f"{name_of} = tl.reshape({whole}, [{part.block_n}, {piece.width}])")
            wide = f"({wide} * {part.letter}_scale{minimum})"
        case "vector":
            at = source.numbers(f"{part.side}_scale")
            lines.append(f"{part.letter}_scale = {scale_number(kept.scale, f'tl.load({at}{rows_guard})')}")
            wide = f"({wide} * {part.letter}_scale[:, None])"
        case "head" | "tensor":
            wide = f"({wide} * {part.side}_scale)"
    return [*lines, f"{name} = {wide}.to(tl.{part.dot})"]
