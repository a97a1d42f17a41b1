"""The documented metrics are exported from the start and shown on dashboards, which use no others."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, Gauge
from tests.certificates import make_certificate

from nouscoder.broker.metrics import BrokerCollector
from nouscoder.domain.conversation import CallEnd
from nouscoder.domain.run_status import IN_FLIGHT, Ledger, RolloutState, RunStatus, StreamStatus
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.metrics import GenerationMetrics, IdleReason
from nouscoder.http_server.bounded_threads import MOST_OPEN
from nouscoder.learner.metrics.prometheus import LearnerMetrics, WaitReason
from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.rpc.metrics_page import read_metrics, start_metrics
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import BackendUse
from nouscoder.verifier.sandbox.runners.pool import Replaced, RunnerState

# Of docs/reference/metrics.md, without the prefix. Scripts of users read these names, so they do not change.
_PROMISED = """
verifier_submissions_total{verdict} verifier_tests_total{outcome} verifier_submission_duration_seconds
verifier_test_duration_seconds verifier_queue_depth verifier_sandboxes{state} verifier_cache_hits_total
verifier_internal_errors_total{cause}
broker_ledger_rollouts{state} broker_stream_lag{stream} broker_pending_leases{stream} broker_dead_letters_total{stream}
broker_redeliveries_total{stream} broker_admission_slots_free broker_policy_version
generation_tokens_total generation_running_rollouts generation_policy_version generation_policy_update_seconds
generation_idle_seconds_total{reason}
learner_steps_total learner_rollout_staleness_versions learner_reward_mean learner_pass_rate learner_entropy
learner_importance_ratio{stat} learner_effective_sample_size learner_clip_fraction{side} learner_gradient_norm
learner_tokens_per_second learner_mfu learner_wait_seconds_total{for} learner_response_length_tokens{correct}
"""
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}
# Of every service, beside its own registry.
COMMON = PROCESS | {"nouscoder_build_info", "nouscoder_certificate_expiry_timestamp_seconds"}
STREAMS = ("tasks", "grading", "batches")


ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "helm" / "nouscoder" / "dashboards").glob("*.json"))
# (file and panel, expression, legend)
EXPRESSIONS = [
    (f"{file.stem}: {panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
    for file in FILES
    for panel in json.loads(file.read_text())["panels"]
    for target in panel.get("targets", [])
]
_VALUES = {"$namespace": "ns", "$release": "nc", "$window": "5m", "$__rate_interval": "1m"}
_NUMBER = re.compile(r"\$(gpu_price|core_price|gpus_generation|gpus_learner)\b")


def filled(expr: str) -> str:
    """The expression with values for the dashboard's variables."""
    for name, value in _VALUES.items():
        expr = expr.replace(name, value)
    return _NUMBER.sub("2", expr)


def fresh_registries() -> list[CollectorRegistry]:
    """The registries of the four services after their start. The broker's run is empty."""
    verifier, learner, broker = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    VerifierMetrics(verifier).scraped.backends = lambda: {"modal": BackendUse(0, 0, 0, "")}
    of_learner = LearnerMetrics(learner)
    of_learner.watch_evaluations(RecordedEvaluations(Path("/no/run")))
    of_learner.watch_storage(Path("/"))
    collector = BrokerCollector()
    empty = Ledger(0, 0, 0, 0, 0, {state.value: 0 for state in IN_FLIGHT})
    streams = tuple(StreamStatus(stream, 0, 0, 0, 0) for stream in STREAMS)
    collector.latest = RunStatus("run", empty, streams, None, 0, 0, 192, False, 0, 0)
    broker.register(collector)
    return [verifier, learner, broker, GenerationMetrics().registry]


def samples(registries: Iterable[CollectorRegistry]) -> dict[str, list[dict[str, str]]]:
    """The labels of each series, by the name of the sample."""
    found: dict[str, list[dict[str, str]]] = {}
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize("promised", _PROMISED.split())
def test_a_documented_metric_is_exported_from_the_start(promised: str) -> None:
    name, _, label = promised.rstrip("}").partition("{")
    found = samples(fresh_registries())
    series = found.get(f"nouscoder_{name}") or found.get(f"nouscoder_{name}_bucket")
    assert series is not None
    assert not label or all(label in labels for labels in series)


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("verifier_submissions_total", "verdict", {kind.value for kind in VerdictKind}),
        (
            "verifier_tests_total",
            "outcome",
            {kind.value for kind in VerdictKind} - {VerdictKind.NO_CODE.value, VerdictKind.COMPILE_ERROR.value},
        ),
        ("verifier_internal_errors_total", "cause", {cause.value for cause in FailureCause}),
        ("verifier_tool_calls_total", "end", {end.value for end in CallEnd}),
        ("verifier_tool_sessions", "state", {"waiting", "open"}),
        ("verifier_runners", "state", {state.value for state in RunnerState}),
        ("verifier_runner_replacements_total", "reason", {reason.value for reason in Replaced}),
        ("broker_ledger_rollouts", "state", {state.value for state in RolloutState}),
        (
            "broker_cancelled_rollouts_total",
            "reason",
            {"stale", "too_small", "problem_gone", "refused", "abandoned", "finished"},
        ),
        ("broker_problems", "state", {"asked", "refused", "left_out"}),
        ("broker_dead_letters_total", "stream", set(STREAMS)),
        ("broker_redeliveries_total", "stream", set(STREAMS)),
        ("generation_idle_seconds_total", "reason", {reason.value for reason in IdleReason}),
        ("learner_wait_seconds_total", "for", {reason.value for reason in WaitReason}),
        ("learner_clip_fraction", "side", {"low", "high"}),
        ("learner_pass_at_g", "groups", {"trained", "all"}),
        ("learner_evaluation_pass_at_k", "k", {"1"}),
        ("learner_response_length_tokens", "correct", {"true", "false"}),
        ("learner_importance_ratio", "stat", {"mean", "min", "max", "mismatch_mean", "mismatch_max"}),
    ],
)
def test_every_value_of_a_label_starts_at_zero(name: str, label: str, values: set[str]) -> None:
    assert {labels[label] for labels in samples(fresh_registries())[f"nouscoder_{name}"]} == values


def test_the_documented_names_equal_those_of_the_code_and_have_the_prefix() -> None:
    found = {
        name for name in samples(fresh_registries()) if not name.endswith(("_created", "_bucket", "_sum", "_count"))
    }
    assert found
    assert [
        name for name in found if not re.fullmatch(r"nouscoder_(verifier|broker|generation|learner)_[a-z_]+", name)
    ] == []


def test_every_metric_and_label_is_on_the_reference_page() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/reference/metrics.md").read_text("utf8").splitlines()]
    listed = {row[0].strip("|` "): row[3] for row in rows if row[0].startswith("| `nouscoder_")}
    endings = re.compile("_(bucket|sum|count|created)$")
    found = samples(fresh_registries())
    wanted = {name if name in listed else endings.sub("", name): series for name, series in found.items()}
    wanted = {name: series for name, series in wanted.items() if name + "_total" not in listed}  # of _created
    assert wanted.keys() <= listed.keys()
    for name, series in wanted.items():
        assert {label for labels in series for label in labels} - {"le"} == set(re.findall(r"`(\w+)`:", listed[name]))


def test_buckets_reach_the_minutes_that_large_weights_and_long_queues_take() -> None:
    found = samples(fresh_registries())
    for name in ("generation_policy_update_seconds", "generation_policy_fetch_seconds", "verifier_queue_wait_seconds"):
        bounds = [float(labels["le"]) for labels in found[f"nouscoder_{name}_bucket"]]
        assert sorted(bounds)[-2] >= 600


def test_clients_beyond_a_hundred_share_a_series() -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    verdict = Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.1, "fake")
    for number in range(150):
        metrics.graded(verdict, f"client-{number}")
    metrics.graded(verdict, "client-3")
    by_client = {labels["client"] for labels in samples([registry])["nouscoder_verifier_client_submissions_total"]}
    assert len(by_client) == 101
    series = "nouscoder_verifier_client_submissions_total"
    assert registry.get_sample_value(series, {"client": "other"}) == 50
    assert registry.get_sample_value(series, {"client": "client-3"}) == 2


def test_runner_pods_are_counted_at_each_scrape() -> None:
    registry = CollectorRegistry()
    states, replaced = {"ready": 2, "lent": 1}, {"worn": 3}
    scraped = VerifierMetrics(registry).scraped
    scraped.runners, scraped.replacements = lambda: states, lambda: replaced
    states["ready"] = 1
    assert registry.get_sample_value("nouscoder_verifier_runners", {"state": "ready"}) == 1
    assert registry.get_sample_value("nouscoder_verifier_runners", {"state": "quarantined"}) == 0
    assert registry.get_sample_value("nouscoder_verifier_runner_replacements_total", {"reason": "worn"}) == 3


def test_the_use_of_compile_caches_is_read_at_each_scrape() -> None:
    registry = CollectorRegistry()
    uses = {"local": BackendUse(0, 0, 0, "", compile_cache=(3, 2, 4096))}
    VerifierMetrics(registry).scraped.backends = lambda: uses
    names = ("hits_total", "misses_total", "bytes")
    read = [registry.get_sample_value(f"nouscoder_verifier_compile_cache_{n}", {"backend": "local"}) for n in names]
    assert read == [3, 2, 4096]
    uses["local"] = BackendUse(0, 0, 0, "")
    assert registry.get_sample_value("nouscoder_verifier_compile_cache_bytes", {"backend": "local"}) == 0


async def test_every_service_exports_its_process_its_build_and_its_certificates(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    files = (str(make_certificate(tmp_path) / "tls.crt"),)
    served = Served("127.0.0.1:0", "127.0.0.1:0", [], lambda server: None, registry, certificates=files)
    async with AsyncExitStack() as stack:
        await start_grpc(served, stack)
    assert set(samples([registry])) >= COMMON


def test_the_dashboards_in_the_chart_are_up_to_date() -> None:
    command = [sys.executable, "-m", "deploy.dashboards", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """Every selector in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if hasattr(node, name):
            yield from selectors(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from selectors(argument)


@pytest.mark.parametrize(("where", "expr", "legend"), EXPRESSIONS, ids=[where for where, _, _ in EXPRESSIONS])
def test_an_expression_is_valid_and_reads_only_exported_metrics_of_the_chosen_release(
    where: str, expr: str, legend: str
) -> None:
    exported = set(samples(fresh_registries())) | COMMON
    read = list(selectors(promql_parser.parse(filled(expr))))
    assert read, where
    for selector in read:
        matched = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert selector.name in exported
        assert (matched["namespace"], matched["app_kubernetes_io_instance"]) == ("ns", "nc")


def test_every_documented_metric_is_on_a_dashboard() -> None:
    text = "".join(expr for _, expr, _ in EXPRESSIONS)
    assert [name for name in _PROMISED.split() if f"nouscoder_{name.partition('{')[0]}" not in text] == []


def test_every_panel_has_a_unit_and_a_sentence() -> None:
    panels = [panel for file in FILES for panel in json.loads(file.read_text())["panels"] if panel["type"] != "row"]
    assert panels
    assert [panel["title"] for panel in panels if not panel["description"].endswith(".")] == []
    assert [panel["title"] for panel in panels if not panel["fieldConfig"]["defaults"]["unit"]] == []


class Prometheus(BaseHTTPRequestHandler):
    """Answers query_range. `nothing` names metrics without series, `gap` those with only NaN."""

    nothing: ClassVar[str] = "no such metric"
    gap: ClassVar[str] = "no such metric"

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        expr = form["query"][0]
        named = re.findall(r"by \(([\w, ]+)\)", expr)
        labels = {label.strip(): "x" for group in named for label in group.split(",")}
        values = [[float(form["end"][0]), "NaN" if self.gap in expr else "0"]]
        series = [] if self.nothing in expr else [{"metric": labels, "values": values}]
        body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def prometheus(*, nothing: str = "no such metric", gap: str = "no such metric") -> Iterator[str]:
    handler = type("Handler", (Prometheus,), {"nothing": nothing, "gap": gap})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def check_dashboards(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy" / "check-dashboards"), "--prometheus", url, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_check_dashboards_passes_when_every_series_exists() -> None:
    with prometheus() as url:
        done = check_dashboards(url)
    assert (done.returncode, done.stdout) == (0, f"{len(EXPRESSIONS)} expressions, 0 panels without data\n")


def test_check_dashboards_names_panels_without_series_or_with_only_gaps() -> None:
    with prometheus(nothing="learner_mfu", gap="learner_entropy") as url:
        done = check_dashboards(url, "--json", "--namespace", "here")
    missing = json.loads(done.stdout)["without_data"]
    assert done.returncode == 1
    assert {(one["panel"], one["reason"]) for one in missing} == {
        ("Model FLOPs utilization", "no series"),
        ("Entropy", "only NaN"),
    }
    assert all('namespace="here"' in one["expr"] for one in missing)


def test_check_dashboards_reports_a_missing_prometheus(tmp_path: Path) -> None:
    with prometheus() as url:
        pass  # closed again
    done = check_dashboards(url)
    assert done.returncode == 2
    assert "no Prometheus at" in done.stderr
    assert check_dashboards(url, "--folder", str(tmp_path)).returncode == 2


async def test_clients_that_say_nothing_keep_nobody_from_the_metrics() -> None:
    """Before, each of them kept a thread for ever."""
    registry = CollectorRegistry()
    Gauge("asked", "a number", registry=registry).set(7)
    async with AsyncExitStack() as stack:
        address = start_metrics("127.0.0.1:0", registry, stack)
        host, port = address.split(":")
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST_OPEN + 20)]
        assert "asked 7.0" in await asyncio.to_thread(read_metrics, address)
        idle[0].settimeout(60)
        assert idle[0].recv(1) == b"", "the oldest was ended"
