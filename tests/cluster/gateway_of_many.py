"""A gateway of NUM runners whose costs are counted: gateway_of_many.py NUM TEMPLATE KEY_FILE PORT STEADY_S

It opens every slot of backend gvisor, keeps them for STEADY_S seconds, and closes. It prints one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections import Counter
from typing import Any

from kubernetes.client import rest

from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox

requests: Counter[str] = Counter()


def count_requests() -> None:
    """Count what the Kubernetes client sends, by verb and resource."""
    send = rest.RESTClientObject.request

    def counted(self: Any, method: str, url: str, *args: Any, **more: Any) -> Any:
        path, _, query = url.partition("?")
        resource_ = "leases" if "/leases" in path else "pods"
        verb = "WATCH" if "watch=" in query else "LIST" if method == "GET" and path.endswith(resource_) else method
        requests[f"{verb} {resource_}"] += 1
        return send(self, method, url, *args, **more)  # type: ignore[no-untyped-call]

    rest.RESTClientObject.request = counted  # type: ignore[method-assign]


def rss_mib() -> float:
    """The memory of this process now [MiB]."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1024**2


class Phase:
    """The time, CPU time and requests since its start."""

    def __init__(self) -> None:
        self.at_s, self.cpu_s, self.requests = time.monotonic(), time.process_time(), requests.copy()

    def costs(self) -> dict[str, Any]:
        wall_s = time.monotonic() - self.at_s
        made = requests - self.requests
        return {
            "wall_s": round(wall_s, 1),
            "cpu_s": round(time.process_time() - self.cpu_s, 1),
            "requests": dict(made),
            "requests_a_second": round(made.total() / wall_s, 2),
            "rss_mib": round(rss_mib()),
        }


async def main(num: int, template: str, key_file: str, port: int, steady_s: float) -> dict[str, Any]:
    """The costs of the start, of the time after it, and of the end."""
    count_requests()
    config = SandboxSection(
        backend="gvisor",
        slots=num,
        pool_template=template,
        pool_key_file=key_file,
        pool_port=port,
        pool_spares=0,
        pool_start_s=120,
    )
    sandbox = GvisorSandbox(config)
    costs: dict[str, Any] = {"runners": num, "rss_mib_before": round(rss_mib())}
    phase = Phase()
    await sandbox.start()
    costs["first_s"] = round(time.monotonic() - phase.at_s, 1)
    made = 0.0
    async with asyncio.timeout(900):
        while sandbox.usable_slots < num:
            if not made and sum(sandbox.use.runners.values()) >= num:
                made = time.monotonic() - phase.at_s
            await asyncio.sleep(0.1)
    costs["planned_s"] = round(made, 1) or None
    costs["start"] = phase.costs()
    costs["mean_start_s"] = round(sandbox.use.runner_starts[1] / sandbox.use.runner_starts[0], 1)
    costs["replacements"] = {reason: number for reason, number in sandbox.use.replacements.items() if number}
    phase = Phase()
    await asyncio.sleep(steady_s)
    gc.collect()
    costs["steady"] = phase.costs()
    phase = Phase()
    await sandbox.close()
    costs["close"] = phase.costs()
    costs["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return costs


if __name__ == "__main__":
    number, file, key, at, steady = sys.argv[1:]
    print(json.dumps(asyncio.run(main(int(number), file, key, int(at), float(steady)))))
