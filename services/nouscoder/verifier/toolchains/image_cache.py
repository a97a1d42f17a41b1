"""Fills the toolchain caches of the sandbox image: python3 -m nouscoder.verifier.toolchains.image_cache

It is run when the image is built, after the compilers are installed and as root. It needs the standard library alone.
"""

from __future__ import annotations

import sys

from nouscoder.verifier.toolchains.languages import find_installed, registry
from nouscoder.verifier.toolchains.toolchain_cache import IMAGE_FOLDER, ToolchainCacheFailed, prepare


def main() -> None:
    """Fill the folder of each installed language that has one."""
    for language in find_installed(registry()).values():
        if language.prepare is not None:
            sys.stdout.write(f"filled {prepare(language, IMAGE_FOLDER / language.name)}\n")


if __name__ == "__main__":
    try:
        main()
    except ToolchainCacheFailed as error:
        sys.exit(f"image_cache: {error}")
