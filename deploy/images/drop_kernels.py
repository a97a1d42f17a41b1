"""drop_kernels.py SITE_PACKAGES: overwrites the compiled GPU kernels in torch's libraries with zeros, for CPU images.

The kernels are 0.3 GB that hardly compress. The libraries keep their size and layout, and a pull is 0.3 GB smaller.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_KERNELS = b".nv_fatbin"
_CHUNK_BYTES = 1 << 20


def sections(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and size [bytes] of each section of an ELF file."""
    header = file.read(64)
    if header[:6] != _ELF_64_LITTLE:
        return
    (table_offset,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, num_entries, names_index = struct.unpack_from("<HHH", header, 58)
    file.seek(table_offset)
    table = file.read(entry_bytes * num_entries)
    entries = [struct.unpack_from("<IIQQQQ", table, i * entry_bytes) for i in range(num_entries)]
    file.seek(entries[names_index][4])
    names = file.read(entries[names_index][5])
    for name, _, _, _, offset, num_bytes in entries:
        yield names[name : names.index(b"\0", name)], offset, num_bytes


def drop(library: Path) -> int:
    """Overwrite the kernels of a library. Returns their bytes."""
    with library.open("r+b") as file:
        found = [(offset, num_bytes) for name, offset, num_bytes in sections(file) if name == _KERNELS]
        for offset, num_bytes in found:
            file.seek(offset)
            for begin in range(0, num_bytes, _CHUNK_BYTES):
                file.write(bytes(min(_CHUNK_BYTES, num_bytes - begin)))
    return sum(num_bytes for _, num_bytes in found)


def main(site_packages: Path) -> None:
    """Drop the kernels of all libraries of torch."""
    for library in sorted((site_packages / "torch" / "lib").glob("*.so*")):
        if dropped := drop(library):
            sys.stderr.write(f"dropped: {dropped} bytes of kernels in {library.name}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
