"""deploy/check-rules: which recording rules and alerts have no data. Prometheus itself answers, over a recorded run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from deploy.dashboards.live import FOLDER, CannotCheck, Span, filled, series_of, targets_of, why_empty
from deploy.dashboards.rules import EXPECTED_EMPTY, Finding, Rule, check, resolved, rules_of, without_comparison
from tests.chart.recorded_prometheus import recorded_prometheus, recorded_until_s
from tests.chart.test_chart_alerts import ALL, ON
from tests.services.test_metrics_and_dashboards import prometheus

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
OWN = 'namespace="compose",app_kubernetes_io_instance="nouscoder"'
SMALL = """
groups:
- name: one
  rules:
  - {record: "a:rate5m", expr: "rate(a_total[5m])"}
  - {alert: High, expr: "a:rate5m > 3"}
"""


@pytest.fixture(scope="module")
def rules(chart: ChartRig) -> list[Rule]:
    """Every rule that the chart can have, for the labels of the recording."""
    document = yaml.safe_dump(chart.one("PrometheusRule", "nouscoder", {**ALL, **ON}))
    return rules_of(document.replace('namespace="here"', 'namespace="compose"'))


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[str, Span]]:
    """A Prometheus with the samples of the recorded run, and its last ten minutes."""
    end_s = recorded_until_s()
    with recorded_prometheus() as url:
        yield url, Span(end_s - 600, end_s, 5)


def test_every_rule_but_the_expected_ones_has_data_in_a_recorded_run(
    recorded: tuple[str, Span], rules: list[Rule]
) -> None:
    url, span = recorded
    # `up`, disks and CronJobs: not recorded
    without = {f"NousCoder{name}" for name in ("ServiceDown", "RedisDown", "VolumeNearlyFull", "BackupFailed")}
    kept = [rule for rule in rules if rule.name not in without]
    assert len(kept) == len(rules) - len(without)
    assert check(url, kept, (), span) == []


# What the learner says of all groups and of evaluations, which it did not when the run was recorded.
NEWER_PANELS = {
    f"run.json: {name}" for name in ("Evaluation", "Evaluated version", "Pass rate", "Reward", "Solved groups")
}


def test_every_panel_but_one_has_data_in_a_recorded_run(recorded: tuple[str, Span]) -> None:
    """Generation reads the policy's folder when all services run on one machine, so it fetches nothing."""
    url, span = recorded
    variables = {"namespace": "compose", "release": "nouscoder", "window": "5m", "__rate_interval": "1m"}
    targets = [target for file in sorted(FOLDER.glob("*.json")) for target in targets_of(file)]
    assert len(targets) > 50
    empty = {
        f"{target.dashboard}: {target.panel}"
        for target in targets
        if why_empty(series_of(url, filled(target.expr, {**variables, **target.settings}), span), target.legend)
    }
    assert empty == {"generation.json: Fetch", *NEWER_PANELS}


def test_an_alert_on_tls_must_have_data_with_tls_and_only_then(recorded: tuple[str, Span], rules: list[Rule]) -> None:
    url, span = recorded
    (rule,) = (rule for rule in rules if rule.name == "NousCoderCertificateExpires")
    assert [(one.rule, one.reason) for one in check(url, [rule], ("tls",), span)] == [(rule.name, "no series")]
    there = Rule(rule.name, f"nouscoder_broker_redis_memory_used_ratio{{{OWN}}} > 1", is_alert=True)
    assert "must have none without tls" in check(url, [there], (), span)[0].reason
    assert check(url, [there], ("tls",), span) == []


def test_rules_without_data_are_named_also_those_that_read_them(recorded: tuple[str, Span]) -> None:
    url, span = recorded
    given = [
        Rule("missing:rate5m", "rate(nouscoder_no_such_metric[5m])", is_alert=False),
        Rule("Reader", "missing:rate5m > 3", is_alert=True),
        Rule("Gap", "0 * nouscoder_broker_run_finished / 0 > 1", is_alert=True),
        Rule("wrong:rate5m", "rate(nouscoder_broker_run_finished)", is_alert=False),
        # NaN and errors count also where no data are expected.
        Rule("NousCoderCertificateExpires", "min(nouscoder_certificate_expiry_timestamp_seconds", is_alert=False),
    ]
    found = {one.rule: one.reason for one in check(url, given[:-1], (), span)}
    assert found.keys() == {"missing:rate5m", "Reader", "Gap", "wrong:rate5m"}
    assert (found["missing:rate5m"], found["Reader"], found["Gap"]) == ("no series", "no series", "only NaN")
    assert "expected type range vector" in found["wrong:rate5m"]
    assert "parse error" in check(url, given[-1:], (), span)[0].reason


def test_a_record_without_the_labels_by_which_it_is_read_is_found(recorded: tuple[str, Span]) -> None:
    url, span = recorded
    record = Rule("all:rate5m", "sum(rate(nouscoder_verifier_submissions_total[5m]))", is_alert=False)
    reader = Rule("Reader", f"all:rate5m{{{OWN}}} > 3", is_alert=True)
    assert check(url, [record, reader], (), span) == [
        Finding("Reader", "no series of the record all:rate5m has these labels", f"all:rate5m{{{OWN}}}")
    ]
    kept = Rule("all:rate5m", record.expr.replace("sum(", "sum by (namespace, app_kubernetes_io_instance) ("), False)
    assert check(url, [kept, reader], (), span) == []


@pytest.mark.parametrize(
    ("expr", "without"),
    [
        ('up{job="a>b"} == 0', 'up{job="a>b"}'),
        ("(a > 3)", "a{}"),
        ("min by (f) (a) - time() < 86400", "min by (f)(a{}) - time()"),
        ("rate(a[5m]) == 0 and b == 1", "(rate(a[5m])) and (b{})"),
        ("a == 0 and on (x) b", "(a{}) and on (x) (b{})"),
        ("a == 1 unless on (x) b", "a{}"),
        ("a > b", "a > b"),  # not with a number: which data it has is the question
        ("rate(a[5m])", "rate(a[5m])"),
    ],
)
def test_an_alert_without_its_comparison(expr: str, without: str) -> None:
    assert without_comparison(expr).replace("{}", "").split() == without.replace("{}", "").split()


def test_records_are_replaced_by_their_expressions_and_these_too() -> None:
    records = {"a:r": "rate(a[5m])", "b:r": 'a:r{x="{"} / c', "d:r": "d:r + 1"}
    assert resolved('b:r{x="y"} + f{name="a:r"}', records) == '((rate(a[5m])) / c) + f{name="a:r"}'
    assert resolved("d:r", records) == "(d:r + 1)"  # one that reads itself ends
    assert resolved("aa:r + a:rr", records) == "aa:r + a:rr"


def test_each_rule_of_the_table_is_one_of_the_chart(rules: list[Rule]) -> None:
    assert set(EXPECTED_EMPTY) <= {rule.name for rule in rules}
    assert len({rule.name for rule in rules}) == len(rules)


@pytest.mark.parametrize("text", ["", "groups: []", "a: 1", "{", "[1]", "groups: [{rules: [{alert: A}]}]"])
def test_what_is_no_rules_is_refused(text: str) -> None:
    with pytest.raises(CannotCheck, match="rule"):
        rules_of(text)


def check_rules(url: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy" / "check-rules"), "--prometheus", url]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_names_what_has_no_data_and_tells_it_by_its_exit_code() -> None:
    with prometheus() as url:
        good = check_rules(url, SMALL)
        refused = check_rules(url, "groups: []")
    assert (good.returncode, good.stdout) == (0, "2 rules, 0 without the expected data\n")
    assert (refused.returncode, refused.stderr) == (2, "check-rules: there is no rule\n")
    away = check_rules(url, SMALL)
    assert away.returncode == 2
    assert "no Prometheus at" in away.stderr
    with prometheus(nothing="a_total") as url:
        bad = check_rules(url, SMALL)
    assert bad.returncode == 1
    assert bad.stdout.splitlines() == [
        "a:rate5m: no series: rate(a_total[5m])",
        "High: no series: (rate(a_total[5m]))",
        "2 rules, 2 without the expected data",
    ]
