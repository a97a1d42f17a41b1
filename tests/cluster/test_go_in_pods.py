"""Go programs on runner pods: the standard library is compiled when the sandbox image is built, not for each program.

Builds a sandbox image with go: `make images` calls deploy/images/build, which takes `--packages golang-go`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.cluster.conftest import ROOT, output_of

from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import PoolConfig, SandboxConfig
from nouscoder.verifier.sandbox.gvisor import GvisorSandbox

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

TAG = "test-go"
LIMITS = Limits(wall_time_s=10, cpu_time_s=10, memory_bytes=256 << 20)
CODE = """package main
import ("bufio"; "fmt"; "os"; "sort")
func main() {
  r := bufio.NewReader(os.Stdin)
  var n int
  fmt.Fscan(r, &n)
  s := []int{3, n}
  sort.Ints(s)
  fmt.Println(s)
}
"""
NO_PROGRAM = "package other\nfunc main() { }"
COMPILE_BOUND_S = 10.0  # an uncached standard library takes 20 s on an idle core


def test_a_go_program_is_compiled_with_the_library_of_the_image(runner_pool: PoolConfig, tmp_path: Path) -> None:
    build = str(ROOT / "deploy/images/build")
    output_of(build, "--accelerator", "cpu", "--packages", "golang-go", "--tag", TAG, "sandbox", limit_s=1500)
    pod = json.loads(Path(runner_pool.template).read_text())
    (container,) = pod["spec"]["containers"]
    container["image"] = f"{container['image'].rpartition(':')[0]}:{TAG}"
    template = tmp_path / "runner-pod.json"
    template.write_text(json.dumps(pod))
    pool = replace(runner_pool, template=str(template))

    async def graded() -> None:
        sandbox = GvisorSandbox(SandboxConfig(backend="gvisor", slots=1, pool=pool))
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        grader.follow(sandbox)
        try:
            tests = StdinTests((StdinCase("2", "[2 3]"),))
            taken_s = []
            for number in range(3):
                code = f"{CODE}// {number}\n"
                verdict = await grader.grade(Submission(tests, code, language="go", limits=LIMITS))
                assert verdict.kind is VerdictKind.ACCEPTED, verdict
                taken_s.append(verdict.duration_s)
            print("a go program is compiled and run on a pod in", ", ".join(f"{one:.2f} s" for one in taken_s))
            assert min(taken_s) < COMPILE_BOUND_S
            refused = await grader.grade(Submission(tests, NO_PROGRAM, language="go", limits=LIMITS))
            assert refused.kind is VerdictKind.COMPILE_ERROR, refused
        finally:
            await sandbox.close()

    asyncio.run(graded())
