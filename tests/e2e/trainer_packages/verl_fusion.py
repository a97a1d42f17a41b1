"""Grades 40 right programs at once with verl's own client of SandboxFusion. Prints their score, from 0 to 1.

The module is loaded from its file, because importing verl needs torch.
"""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_PROGRAMS = 40
CODE = "print(sum(map(int, input().split())))"


def main(url: str) -> None:
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "utils" / "reward_score" / "sandbox_fusion" / "utils.py"
    spec = importlib.util.spec_from_file_location("verl_sandbox_fusion", file)
    assert spec is not None
    assert spec.loader is not None
    fusion = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fusion)

    def is_right(number: int) -> bool:
        pairs = {"inputs": [f"{number} 1"], "outputs": [str(number + 1)]}
        (result,), _ = fusion.check_correctness(f"{url}/run_code", pairs, CODE, timeout=10)
        return result is True

    with ThreadPoolExecutor(NUM_PROGRAMS) as pool:
        print(sum(pool.map(is_right, range(NUM_PROGRAMS))) / NUM_PROGRAMS)


main(sys.argv[1])
