"""The peak rate of the device, for the model FLOPs utilisation."""

from __future__ import annotations

import time

import torch

_SIZE = 1024
_LIMIT_S = 0.2


def measured_peak_flops(device: str) -> float:
    """Floating-point operations per second of the fastest of several float32 matrix products on `device`."""
    left = torch.ones(_SIZE, _SIZE, device=device)
    best_s = float("inf")
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end or best_s == float("inf"):
        started = time.perf_counter()
        # Reading one element waits for a device that works asynchronously.
        float((left @ left)[0, 0])
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * _SIZE**3 / best_s
