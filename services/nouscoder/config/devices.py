"""The device of `device = "auto"`: cuda where this machine has a GPU that torch can use, else cpu. torch is not loaded.

`auto` is replaced when a configuration is read, so no part of a run ever sees it, and config.toml records the device.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

# What drivers make: NVIDIA's, that of Windows Subsystem for Linux, and AMD's, whose GPUs torch calls cuda too.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_BUILT_FOR = re.compile(r"^(?:cuda|hip)\b[^=]*= *['\"]", re.MULTILINE)
_EMPTY_BYTES = 1024**2  # deploy/images/empty_cuda.py makes libraries that are smaller; real ones have 50 MB and more
_HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES


def has_gpu() -> bool:
    """Whether this machine has the driver of a GPU that torch may be able to use."""
    return any(file.exists() for file in DRIVERS)


def no_gpu_in_torch() -> str:
    """Why torch can use no GPU of a machine that has one, as the end of a sentence; "" when it can."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return "CUDA_VISIBLE_DEVICES hides it"
    folder = _torch_folder()
    if folder is None:
        return "torch is not installed"
    if not _BUILT_FOR.search((folder / "version.py").read_text(encoding="utf8")):
        return "the torch that is installed was built without CUDA"
    if any(file.stat().st_size < _EMPTY_BYTES for file in folder.parent.glob("nvidia/*/lib/libcublas.so.*")):
        return "torch is installed for CPUs, without NVIDIA's libraries (make ACCELERATOR=cuda installs them)"
    return ""


def device_fault(key: str, device: str) -> str:
    """Why `device`, which `key` names, certainly cannot compute here, and what to set; "" when it may."""
    if not device.startswith("cuda"):
        return ""
    why = no_gpu_in_torch() if has_gpu() else "this machine has no GPU that torch could use (no /dev/nvidiactl)"
    return f'{key} is "{device}", and {why}: take "cpu"' if why else ""


@cache
def _torch_folder() -> Path | None:
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _resolved(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise ValueError("must be auto, cpu, cuda or cuda:NUMBER")
    if device != "auto":
        return device
    return "cuda" if has_gpu() and not no_gpu_in_torch() else "cpu"


Device = Annotated[
    str,
    Field(description="torch device; auto: cuda where torch can use a GPU of this machine, else cpu"),
    AfterValidator(_resolved),
]


def device_key() -> str:
    """The key `device` of a part that computes."""
    key: str = Field("auto", validate_default=True)
    return key
