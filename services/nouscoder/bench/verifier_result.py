"""The figures of `nouscoder bench verifier`, as records and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nouscoder.bench.peers import PeerBench, as_lines


@dataclass(frozen=True, slots=True)
class Throughput:
    """One kind of load. `multiple` is tests per second and core over bare interpreter spawns per second on one core."""

    submissions: int
    tests_a_submission: int
    wall_s: float
    tests_per_second_per_core: float
    bare_spawns_per_second: float
    multiple: float
    gateway_cpu_share: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds to an answer at half of the capacity, for submissions of 20 tests."""

    submissions: int
    load_submissions_per_second: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class VerifierBench:
    """The figures of one run. `peak_memory_bytes` is the highest observed sum of proportional set sizes.

    `stolen_cpu_share` is the share of CPU that the hypervisor gave to other machines. If it is high, repeat the bench.
    """

    backend: str
    num_cores: int
    bare_spawns_per_second: float
    forks_per_second: float
    warm_forks_per_second: float  # each runs a test without isolation, see controls.py
    many_small_tests: Throughput
    one_test_submissions: Throughput
    latency_at_half_load: Latency
    peak_memory_bytes: int
    stolen_cpu_share: float
    peers: tuple[PeerBench, ...] = ()
    processes: int = 1  # of the figures in `with_processes`
    with_processes: Throughput | None = None  # submissions of one test


def as_text(result: VerifierBench) -> str:
    """The figures as readable lines."""
    many, single, late = result.many_small_tests, result.one_test_submissions, result.latency_at_half_load
    rows = [
        f"backend {result.backend}, {result.num_cores} cores, cache off, client and service on the same cores",
        f"control: {result.bare_spawns_per_second:.0f} bare interpreter spawns/s,"
        f" {result.forks_per_second:.0f} forks/s, {result.warm_forks_per_second:.0f} tests/s in unisolated forks of a"
        f" warm interpreter; {result.stolen_cpu_share:.1%} of the CPU stolen",
        f"many small tests: {many.tests_per_second_per_core:.0f} tests/s a core = {many.multiple:.2f}x bare spawns",
        f"one-test submissions: {single.tests_per_second_per_core:.0f}/s a core = {single.multiple:.2f}x bare spawns",
        f"20 tests at half load ({late.load_submissions_per_second:.1f} submissions/s):"
        f" p50 {late.p50_s * 1e3:.0f} ms, p99 {late.p99_s * 1e3:.0f} ms",
        f"gateway: {many.gateway_cpu_share:.0%} of the service's CPU (one-test submissions:"
        f" {single.gateway_cpu_share:.0%}); peak memory {result.peak_memory_bytes >> 20} MiB",
        *_several_lines(result),
        *(line for peer in result.peers for line in as_lines(peer)),
    ]
    return "\n".join(rows)


def _several_lines(result: VerifierBench) -> list[str]:
    several = result.with_processes
    if several is None:
        return []
    return [
        f"{result.processes} gateway processes, one-test submissions: {several.tests_per_second_per_core:.0f}/s a core"
        f" = {several.multiple:.2f}x bare spawns; gateways: {several.gateway_cpu_share:.0%} of the service's CPU"
    ]


def as_record(result: VerifierBench) -> dict[str, Any]:
    """The figures as a record for scripts."""
    return asdict(result)
