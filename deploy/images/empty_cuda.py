"""empty_cuda.py SITE_PACKAGES INTO: makes empty libraries in place of NVIDIA's libraries that torch's wheel needs.

The wheel links against 2.7 GB of libraries, which a machine without a GPU loads but never calls. For each one that is
not installed the script makes a small library with the same name and symbols; its functions print a message and abort.
Their paths relative to INTO are those that they must have in the virtual environment of SITE_PACKAGES.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_SOURCE = """
#include <stdlib.h>
#include <unistd.h>
static void refuse(void) {
  static const char said[] = "torch is installed for CPUs: {name} is an empty library (make with ACCELERATOR=cuda)\\n";
  if (write(2, said, sizeof said - 1)) abort();
  abort();
}
"""
_NVIDIA = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
_FROM_DRIVER = "libcuda.so.1"  # opened only if there is a GPU; no package installs it


def needed(libraries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """NVIDIA's libraries that `libraries` need: library -> version ("" for none) -> symbols."""
    asked: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    bare: set[str] = set()
    for library in libraries:
        command = ["readelf", "--dynamic", "--version-info", "--dyn-syms", "--wide", str(library)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        asked.update({name: asked[name] for name in re.findall(r"\(NEEDED\).*\[(.+)\]", said)})
        of_version: dict[str, str] = {}
        for block in said.split(" Version: 1  File: ")[1:]:
            of_version.update(dict.fromkeys(re.findall(r"  Name: (\S+)  Flags", block), block.split()[0]))
        for symbol, version in re.findall(r" UND (\w+)(?:@(\S+))?", said):
            if version in of_version:
                asked[of_version[version]][version].add(symbol)
            else:
                bare.add(symbol)
    asked = {name: versions for name, versions in asked.items() if _NVIDIA.fullmatch(name) and name != _FROM_DRIVER}
    for symbol in bare:  # goes to the library with the longest matching name: cusparseLtInit to cusparseLt
        stems = [name for name in asked if symbol.lower().startswith(name[3:].split(".")[0].lower())]
        if stems:
            asked[max(stems, key=len)][""].add(symbol)
    return asked


def make(library: Path, versions: dict[str, set[str]]) -> None:
    """Compile the empty library `library` with the symbols of `versions`."""
    with tempfile.TemporaryDirectory() as part:
        source, script = Path(part) / "empty.c", Path(part) / "empty.map"
        symbols = sorted(set[str]().union(*versions.values()))
        functions = "".join(f"void {symbol}(void) {{ refuse(); }}\n" for symbol in symbols)
        source.write_text(_SOURCE.replace("{name}", library.name) + functions)
        named = {version: symbols for version, symbols in versions.items() if version}
        script.write_text("".join(f"{v} {{ {' '.join(f'{s};' for s in sorted(named[v]))} }};\n" for v in named))
        flags = ["-shared", "-fPIC", "-fno-builtin", "-w", "-Os", "-s", f"-Wl,-soname,{library.name}"]
        versioned = [f"-Wl,--version-script={script}"] if named else []
        subprocess.run(["gcc", *flags, *versioned, "-o", str(library), str(source)], check=True)


def main(site_packages: Path, into: Path) -> None:
    """Make each missing library."""
    torch = sorted((site_packages / "torch" / "lib").glob("*.so*"))
    present = {path.name for path in (site_packages / "nvidia").rglob("*.so*")}
    real = site_packages / "nvidia" / "cu13" / "lib"  # on the search path that torch's libraries carry
    if not torch or not real.is_dir():
        sys.exit(f"empty_cuda: {site_packages} has no torch that searches nvidia/cu13/lib")
    folder = into / real.relative_to(site_packages.parents[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, versions in sorted(needed(torch).items()):
        if name not in present:
            make(folder / name, versions)
            sys.stderr.write(f"empty: {name}, {sum(map(len, versions.values()))} symbols\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
