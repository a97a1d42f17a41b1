"""Programs of the corpus that read what a pod holds, in a runner with a pod's mounts and the chart's capabilities."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from tests.attack_corpus import load_attacks
from tests.runsc_runners import CHART_CAPABILITIES, WITH_SYS_ADMIN, runsc_pool

from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
FILLED = {"@PROJECT@": "/nowhere", "@PORT@": "9", "@ABSTRACT@": "nobody", "@SOCKET@": "/no/no", "@HOST@": "nowhere"}
READING = [
    one
    for one in load_attacks().values()
    if one.name.startswith("reading/") and "gvisor" in one.table.get("backends", ("gvisor",))
]


@pytest.mark.parametrize("capabilities", [CHART_CAPABILITIES, WITH_SYS_ADMIN], ids=["chart", "SYS_ADMIN"])
async def test_no_program_reads_what_the_pod_holds(capabilities: tuple[str, ...]) -> None:
    try:
        async with runsc_pool(capabilities) as sandbox:
            grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
            verdicts = {one.name: await grader.grade(one.submission(FILLED)) for one in READING}
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    wrong = {one.name: verdicts[one.name] for one in READING if verdicts[one.name].kind not in one.verdicts}
    assert not wrong
