"""What 1,000 runner pods cost their gateway and the Kubernetes API: memory, CPU, requests. It prints the figures.

The nodes are KWOK's and `runner_stand_in.py` answers for all pods, so neither sandboxes nor candidates run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster import kwok
from tests.free_addresses import free_addresses

from nouscoder.config import SandboxSection

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3000)]

HERE = Path(__file__).parent
NUM = int(os.environ.get("NOUSCODER_MANY_RUNNERS", "1000"))
STEADY_S = int(os.environ.get("NOUSCODER_MANY_RUNNERS_S", "150"))
_SERVED = re.compile(r'^apiserver_request_total\{.*resource="pods".*subresource="(\w*)".*verb="(\w+)".*\} (\d+)', re.M)


@contextmanager
def stand_in(port: int, key_file: str) -> Iterator[None]:
    """The process that answers for all runners."""
    command = [sys.executable, str(HERE / "runner_stand_in.py"), str(port), key_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.terminate()


def kubectl(*words: str) -> str:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=60, check=True).stdout


def served() -> Counter[str]:
    """The requests for pods that the API server has answered, of all its clients."""
    counted: Counter[str] = Counter()
    for subresource, verb, number in _SERVED.findall(kubectl("get", "--raw", "/metrics")):
        counted[f"{verb} {subresource}".strip()] += int(number)
    return counted


def test_a_thousand_runners_cost_few_requests_each_and_none_while_nothing_changes(
    runner_pool: SandboxSection, tmp_path: Path
) -> None:
    program = kwok.build(tmp_path)
    name = f"nouscoder-kwok-{secrets.token_hex(3)}"
    pod = kwok.on_its_nodes(json.loads(Path(runner_pool.pool_template).read_text()), name)
    (tmp_path / "pod.json").write_text(json.dumps(pod))
    port = int(free_addresses(1)[0].rpartition(":")[2])
    before = served()
    with kwok.nodes(program, NUM, name), stand_in(port, runner_pool.pool_key_file):
        words = [str(NUM), str(tmp_path / "pod.json"), runner_pool.pool_key_file, str(port), str(STEADY_S)]
        command = [sys.executable, str(HERE / "gateway_of_many.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2400, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
    costs = json.loads(done.stdout)
    lines = Counter(line.partition(":")[0][:100] for line in done.stderr.splitlines())
    print(json.dumps(costs, indent=1), f"log: {lines.most_common(5)}", sep="\n")
    print("answered by the API server, for all clients:", dict(served() - before))
    started, steady = costs["start"]["requests"], costs["steady"]["requests"]
    assert costs["replacements"] == {}
    assert started["POST pods"] == NUM
    assert started.get("DELETE pods", 0) == 0
    assert started["LIST pods"] <= 2 + costs["start"]["wall_s"] / 60, "lists do not grow with the pods"
    assert sum(steady.values()) <= 0.5 * STEADY_S, steady
    assert sum(costs["close"]["requests"].values()) < 10, "all pods are deleted by one request"
    namespace = pod["metadata"]["namespace"]
    assert kubectl("get", "pods,leases", "-n", namespace, "-o", "name").split() == []
