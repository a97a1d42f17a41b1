"""Process 1 of a sandbox runner: python3 -I -S /opt/nouscoder/runner/__main__.py

It listens, checks that the peer is a gateway with the pool's key, and gives the connection to a fresh harness as its
stdin and stdout. It decrypts and encrypts the bytes of a submission on their way, and looks at none of them.

INVARIANT: at most one slot (with its partners) is in use at a time. When its connection ends, every other process
of the container is dead before the next slot starts, or this process exits and the container ends.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from agent import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
