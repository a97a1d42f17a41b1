"""docs/reference/metrics.md: every Prometheus metric of the services, with its type, unit, labels and meaning.

It makes the collectors of each service without the service, and reads what they export. deploy/generated writes the
page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry, Metric

from nouscoder.broker.metrics import BrokerCollector
from nouscoder.domain.run_status import IN_FLIGHT, Ledger, RunStatus, StreamStatus
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.rpc.certificate_expiry import ExpiryCollector
from nouscoder.rpc.server import BuildCollector
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.processes.parent import Gateways
from nouscoder.verifier.sandbox.base import BackendUse

HEAD = """# Metrics

Every service exports its metrics in Prometheus' form at `metrics` of its section ([operating.md](../operating.md)).
Names and labels are an interface: dashboards, alerts and scripts read them. `make generated` writes this page.

A histogram has the series `_bucket`, `_sum` and `_count`. A summary has `_sum` and `_count`. Each listed value of a
label exists from the start, with 0. "any" marks a label whose values depend on the run. A share is between 0 and 1.
Every service has the `process_*` metrics of Prometheus' client too.
"""
# The unit by the end of the name; the first that fits.
UNITS = (
    ("timestamp_seconds", "Unix seconds"),
    ("tokens_per_second", "tokens a second"),
    ("seconds(_total)?", "seconds"),
    ("bytes", "bytes"),
    ("tokens(_total)?", "tokens"),
    ("dollars_total", "US dollars"),
    ("entropy", "nats"),
    ("staleness_versions", "versions"),
    ("ratio_mean|importance_ratio|model_reward_correlation|reward_mean|gradient_norm", "none"),
    ("ratio|_rate|_at_[kg]|_mfu|_fraction|effective_sample_size|standard_error", "share"),
    ("policy_version", "version"),
    ("balanced|finished|limited|build_info", "0 or 1"),
)
OPEN = {"client", "backend", "file", "name", "k", "version", "python", "revision", "status"}
# Families without a series at the start.
LATER = {"nouscoder_learner_diagnostic": ["name"], "nouscoder_certificate_expiry_timestamp_seconds": ["file"]}


def registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """(service, its registry) after the start, with an empty run."""
    names = ("Every service", "Broker", "Generation", "Learner", "Verifier", "Verifier with several processes")
    common, broker, _, learner, verifier, gateways = (CollectorRegistry() for _ in names)
    BuildCollector(common)
    ExpiryCollector(common, [])
    collector = BrokerCollector()
    ledger = Ledger(0, 0, 0, 0, 0, {state.value: 0 for state in IN_FLIGHT})
    streams = tuple(StreamStatus(name, 0, 0, 0, 0) for name in ("tasks", "grading", "batches"))
    collector.latest = RunStatus("run", ledger, streams, None, 0, 0, 0, False, 0, 0)
    broker.register(collector)
    of_learner = LearnerMetrics(learner)
    of_learner.watch_evaluations(RecordedEvaluations(Path("/no/run")))
    of_learner.watch_storage(Path("/"))
    scraped = VerifierMetrics(verifier).scraped
    scraped.backends = lambda: {"local": BackendUse(0, 0, 0, "")}
    scraped.threads = lambda: {"body": (0, 0.0), "test": (0, 0.0)}
    with TemporaryDirectory() as folder:
        gateways.register(Gateways([], Path(folder)).metrics)
        yield from zip(names, (common, broker, GenerationMetrics().registry, learner, verifier, gateways), strict=True)


def exported_name(family: Metric) -> str:
    """The name that a query uses; for a histogram or a summary without its endings."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def unit_of(name: str) -> str:
    """The unit of a metric of this exported name; "number" for what is counted."""
    return next((unit for ending, unit in UNITS if re.search(f"({ending})$", name)), "number")


def labels_of(family: Metric) -> str:
    """The labels and their values. Raises KeyError for a family without a series that LATER does not name."""
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            for label, value in sample.labels.items():
                values.setdefault(label, {})[value] = None
    values.pop("le", None)
    if not family.samples:
        values = {label: {} for label in LATER[family.name]}
    return "; ".join(
        f"`{label}`: " + ("any" if label in OPEN else ", ".join(f"`{value}`" for value in each))
        for label, each in values.items()
    )


def metrics_text() -> str:
    """The text of an up-to-date docs/reference/metrics.md."""
    lines = [HEAD]
    for service, registry in registries():
        lines += [f"## {service}", "| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
        for family in sorted(registry.collect(), key=lambda each: each.name):
            name = exported_name(family)
            text = family.documentation.rstrip(".").replace("|", "\\|")
            lines.append(f"| `{name}` | {family.type} | {unit_of(name)} | {labels_of(family)} | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
