"""Go programs on runner pods: the standard library is compiled when the sandbox image is built, not for each program.

It builds a sandbox image with go: `deploy/images/build --packages golang-go sandbox`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.conftest import ROOT, output_of
from tests.cluster.pod_grader import image_of, pod_grader

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind

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


async def test_a_go_program_is_compiled_with_the_library_of_the_image(
    runner_pool: SandboxSection, tmp_path: Path
) -> None:
    build = str(ROOT / "deploy/images/build")
    output_of(build, "--accelerator", "cpu", "--packages", "golang-go", "--tag", TAG, "sandbox", limit_s=1500)
    image = f"{image_of(runner_pool).rpartition(':')[0]}:{TAG}"
    tests = StdinTests((StdinCase("2", "[2 3]"),))
    taken_s = []
    async with pod_grader(runner_pool, tmp_path, {"image": image}) as (grader, _):
        for number in range(3):
            code = f"{CODE}// {number}\n"
            verdict = await grader.grade(Submission(tests, code, language="go", limits=LIMITS))
            assert verdict.kind is VerdictKind.ACCEPTED, verdict
            taken_s.append(verdict.duration_s)
        refused = await grader.grade(Submission(tests, NO_PROGRAM, language="go", limits=LIMITS))
    print("a go program is compiled and run on a pod in", ", ".join(f"{one:.2f} s" for one in taken_s))
    assert min(taken_s) < COMPILE_BOUND_S
    assert refused.kind is VerdictKind.COMPILE_ERROR, refused
