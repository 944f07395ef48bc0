"""The smallest RISC-V executable that ttnn 0.81.1 loads as a compiled kernel.

ttnn reads a kernel's ELF file before it places a program, on a mock chip too. This one has a text
segment at address 0 that returns at once, and one relocation without effect, because the loader
(tt_metal/llrt/tt_elffile.cpp) refuses a file without a relocation section. No emulated chip runs it.
"""

from __future__ import annotations

import struct

_RISCV, _EXECUTABLE = 243, 2  # e_machine, e_type of the ELF specification
_PROGBITS, _SYMTAB, _STRTAB, _RELA = 1, 2, 3, 4
_HEADER_BYTES, _SEGMENT_BYTES, _SECTION_BYTES = 52, 32, 40
_NOP, _RETURN = 0x00000013, 0x00008067


def _string_table(names: list[str]) -> tuple[bytes, dict[str, int]]:
    """Null-terminated names, the first one empty, and where each begins."""
    table, offsets = b"\0", {}
    for name in names:
        offsets[name] = len(table)
        table += name.encode() + b"\0"
    return table, offsets


def null_kernel() -> bytes:
    """The file's bytes: 32-bit, little-endian, loadable at address 0."""
    text = struct.pack("<2I", _NOP, _RETURN)
    relocations = struct.pack("<IIi", 0, 2 << 8, 0)  # R_RISCV_NONE against symbol 2
    symbol_names, symbol_at = _string_table(["_start"])
    symbols = (
        bytes(16)
        + struct.pack("<IIIBBH", 0, 0, 0, 3, 0, 1)  # the text section itself, local
        + struct.pack("<IIIBBH", symbol_at["_start"], 0, len(text), 0x12, 0, 1)  # global function
    )
    section_names, name_at = _string_table(
        [".text", ".rela.text", ".symtab", ".strtab", ".shstrtab"]
    )

    # name, kind, flags, contents, link, info, alignment, entry size; the order gives the section numbers
    sections = [
        (".text", _PROGBITS, 6, text, 0, 0, 4, 0),
        (".rela.text", _RELA, 0x40, relocations, 3, 1, 4, 12),
        (".symtab", _SYMTAB, 0, symbols, 4, 2, 4, 16),
        (".strtab", _STRTAB, 0, symbol_names, 0, 0, 1, 0),
        (".shstrtab", _STRTAB, 0, section_names, 0, 0, 1, 0),
    ]
    body, offsets = b"", []
    start = _HEADER_BYTES + _SEGMENT_BYTES
    start += -start % 16
    for section in sections:
        offsets.append(start + len(body))
        body += section[3] + bytes(-len(section[3]) % 4)
    table_at = start + len(body)

    table = bytes(_SECTION_BYTES)
    for (name, kind, flags, content, link, info, alignment, entry), offset in zip(
        sections, offsets, strict=True
    ):
        table += struct.pack(
            "<10I",
            name_at[name],
            kind,
            flags,
            0,
            offset,
            len(content),
            link,
            info,
            alignment,
            entry,
        )
    header = b"\x7fELF" + bytes([1, 1, 1]) + bytes(9)
    header += struct.pack("<HHIIIII", _EXECUTABLE, _RISCV, 1, 0, _HEADER_BYTES, table_at, 0)
    header += struct.pack(
        "<HHHHHH",
        _HEADER_BYTES,
        _SEGMENT_BYTES,
        1,
        _SECTION_BYTES,
        len(sections) + 1,
        len(sections),
    )
    segment = struct.pack("<8I", 1, offsets[0], 0, 0, len(text), len(text), 5, 16)
    head = header + segment
    return head + bytes(start - len(head)) + body + table
