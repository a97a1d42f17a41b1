"""The PrometheusRule: promtool accepts it and runs its unit tests, its metrics exist, each alert has a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
import yaml
from tests.services.test_metrics_and_dashboards import COMMON, fresh_registries, samples

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
# All alerts: with TLS, with backups, and with containers of Modal.
ALL = {
    "backup": {"schedule": "0 3 * * *"},
    "tls": {"enabled": True, "existingSecret": "certificates"},
    "verifier": {"sandbox": {"modal": {"existingSecret": "modal-token"}}},
    "config": {"verifier": {"sandbox": {"spill_over": {"backend": "modal"}, "modal": {"image": "example.org/s:1"}}}},
}
ON = {"prometheusRule": {"enabled": True}}
OWN = '{namespace="here",app_kubernetes_io_instance="nouscoder"%s}'

Document = dict[str, Any]


def rules(chart: ChartRig, **settings: Any) -> list[Document]:
    values = {**ALL, "prometheusRule": {"enabled": True, **settings}}
    return [
        rule for group in chart.one("PrometheusRule", "nouscoder", values)["spec"]["groups"] for rule in group["rules"]
    ]


def series(name: str, values: str, more: str = "") -> dict[str, str]:
    return {"series": name + OWN % more, "values": values}


def up(component: str, values: str = "1x100") -> dict[str, str]:
    return series("up", values, f',app_kubernetes_io_component="{component}"')


def claim(name: str, values: str) -> dict[str, str]:
    return {
        "series": f'kubelet_volume_stats_{name}{{namespace="here",persistentvolumeclaim="nouscoder-redis"}}',
        "values": values,
    }


def backup(name: str, values: str) -> dict[str, str]:
    return {"series": f'kube_cronjob_{name}{{namespace="here",cronjob="nouscoder-backup"}}', "values": values}


# One submission a second.
GRADED = series("nouscoder_verifier_submissions_total", "0+60x100")
# Alert -> (series while it must fire, series while it must not). One sample each minute, for 100 minutes.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "NousCoderServiceDown": (
        [series("up", "0x100", ',app_kubernetes_io_component="broker"')],
        [series("up", "1x100", ',app_kubernetes_io_component="broker"')],
    ),
    "NousCoderPodsMissing": (
        [*(up(name) for name in ("verifier", "generation", "learner")), up("broker", "1x30 stale")],
        [*(up(name) for name in ("verifier", "generation", "learner")), up("broker", "1x30 stale stale stale 1x60")],
    ),
    "NousCoderRunnersMissing": (
        [
            series("nouscoder_verifier_runners", "1x100", ',state="ready"'),
            series("nouscoder_verifier_runners", "1x100", ',state="starting"'),
            series("nouscoder_verifier_queue_depth", "0x100"),
        ],
        [
            series("nouscoder_verifier_runners", "1x100", ',state="ready"'),
            series("nouscoder_verifier_runners", "1x100", ',state="lent"'),
            series("nouscoder_verifier_queue_depth", "9x100"),
        ],
    ),
    "NousCoderRedisDown": (
        [up("broker"), series("nouscoder_broker_run_finished", "0x50 stale")],
        [up("broker"), series("nouscoder_broker_run_finished", "0x100")],
    ),
    "NousCoderRunFinished": (
        [series("nouscoder_broker_run_finished", "0x50 1x50")],
        [series("nouscoder_broker_run_finished", "0x100")],
    ),
    "NousCoderVolumeNearlyFull": (
        [
            series("nouscoder_learner_storage_free_ratio", "0.5x100"),
            claim("available_bytes", "9x100"),
            claim("capacity_bytes", "100x100"),
        ],
        [
            series("nouscoder_learner_storage_free_ratio", "0.5x100"),
            claim("available_bytes", "11x100"),
            claim("capacity_bytes", "100x100"),
        ],
    ),
    # The clock of promtool begins at 0.
    "NousCoderBackupOld": (
        [backup("created", "-95000x100")],
        [backup("created", "-95000x100"), backup("status_last_successful_time", "-9000x100")],
    ),
    "NousCoderBackupFailed": (
        [backup("status_last_schedule_time", "-12000x100"), backup("created", "-13000x100")],
        [backup("status_last_schedule_time", "-12000x100"), backup("status_last_successful_time", "-9000x100")],
    ),
    "NousCoderQueueSlow": (
        [
            series("nouscoder_verifier_queue_depth", "90x100"),
            series("nouscoder_verifier_submissions_total", "0+60x100"),
        ],
        [
            series("nouscoder_verifier_queue_depth", "50x100"),
            series("nouscoder_verifier_submissions_total", "0+60x100"),
        ],
    ),
    "NousCoderQueueOld": (
        [series("nouscoder_verifier_queue_oldest_age_seconds", "400x100")],
        [series("nouscoder_verifier_queue_oldest_age_seconds", "200x100")],
    ),
    "NousCoderWorkOld": (
        [series("nouscoder_broker_oldest_age_seconds", "7000+60x100", ',stream="grading"')],
        [series("nouscoder_broker_oldest_age_seconds", "3600x100", ',stream="grading"')],
    ),
    "NousCoderStalenessAtBound": (
        [
            series("nouscoder_learner_rollout_staleness_versions_bucket", "0+4x100", ',le="3.0"'),
            series("nouscoder_learner_rollout_staleness_versions_count", "0+10x100"),
        ],
        [
            series("nouscoder_learner_rollout_staleness_versions_bucket", "0+9x100", ',le="3.0"'),
            series("nouscoder_learner_rollout_staleness_versions_count", "0+10x100"),
        ],
    ),
    "NousCoderCertificateExpires": (
        # The clock of promtool begins with 1970.
        [series("nouscoder_certificate_expiry_timestamp_seconds", "864000x100", ',file="/etc/tls.crt"')],
        [series("nouscoder_certificate_expiry_timestamp_seconds", "8640000x100", ',file="/etc/tls.crt"')],
    ),
    "NousCoderBackendLimited": (
        [series("nouscoder_verifier_backend_limited", "1x100", ',backend="modal",cap="dollars"')],
        [series("nouscoder_verifier_backend_limited", "0x100", ',backend="modal",cap="dollars"')],
    ),
    "NousCoderInternalErrors": (
        [
            series("nouscoder_verifier_internal_errors_total", "0+2x100", ',cause="sandbox"'),
            series("nouscoder_verifier_submissions_total", "0+100x100"),
        ],
        [
            series("nouscoder_verifier_internal_errors_total", "7x100", ',cause="sandbox"'),
            series("nouscoder_verifier_submissions_total", "0+100x100"),
        ],
    ),
    "NousCoderRunnersDoNotStart": (
        [series("nouscoder_verifier_runner_replacements_total", "0+1x100", ',reason="stuck"')],
        [series("nouscoder_verifier_runner_replacements_total", "0+1x100", ',reason="worn"')],
    ),
    "NousCoderRunnersQuarantined": (
        [series("nouscoder_verifier_runners", "1x100", ',state="quarantined"')],
        [series("nouscoder_verifier_runners", "0x100", ',state="quarantined"')],
    ),
    "NousCoderNoSteps": (
        [series("nouscoder_broker_steps_total", "9x100"), series("nouscoder_broker_run_finished", "0x100")],
        [series("nouscoder_broker_steps_total", "9x100"), series("nouscoder_broker_run_finished", "1x100")],
    ),
    "NousCoderRolloutsStale": (
        [
            series("nouscoder_broker_ledger_rollouts", "0+3x100", ',state="stale"'),
            series("nouscoder_broker_ledger_rollouts", "0+7x100", ',state="trained"'),
        ],
        [
            series("nouscoder_broker_ledger_rollouts", "0+1x100", ',state="stale"'),
            series("nouscoder_broker_ledger_rollouts", "0+9x100", ',state="trained"'),
        ],
    ),
    "NousCoderLedgerUnbalanced": (
        [series("nouscoder_broker_ledger_balanced", "0x100")],
        [series("nouscoder_broker_ledger_balanced", "1x100")],
    ),
    "NousCoderDeadLetters": (
        [series("nouscoder_broker_dead_letters_total", "0x50 1x50", ',stream="grading"')],
        [series("nouscoder_broker_dead_letters_total", "4x100", ',stream="grading"')],
    ),
    "NousCoderRedisFull": (
        [series("nouscoder_broker_redis_memory_used_ratio", "0.8x100")],
        [series("nouscoder_broker_redis_memory_used_ratio", "0.7x100")],
    ),
    "NousCoderCheckpointsFail": (
        [series("nouscoder_learner_checkpoints_total", "0+1x100", ',outcome="failed"')],
        [series("nouscoder_learner_checkpoints_total", "0+1x100", ',outcome="written"')],
    ),
}


def firing(name: str, given: list[dict[str, str]], selector: str, fires: int, at: str = "90m") -> Document:
    """A unit test of promtool: so many alerts fire."""
    expr = f'count(ALERTS{{{selector}alertstate="firing"}}) or vector(0)'
    expected = [{"expr": expr, "eval_time": at, "exp_samples": [{"labels": "{}", "value": fires}]}]
    return {"name": name, "interval": "1m", "input_series": given, "promql_expr_test": expected}


def check(chart: ChartRig, folder: Path, tests: list[Document], values: Document | None = None) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    spec = chart.one("PrometheusRule", "nouscoder", {**ALL, **ON, **(values or {})})["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(spec))
    unit = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(unit))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_on_its_symptom_and_is_silent_without_it(chart: ChartRig, tmp_path: Path) -> None:
    """promtool evaluates the rules over given series: for each alert once with the symptom, once without."""
    assert set(CASES) == {rule["alert"] for rule in rules(chart) if "alert" in rule}
    tests = [
        firing(f"{alert} {'fires' if fires else 'is silent'}", given, f'alertname="{alert}",', int(fires))
        for alert, cases in CASES.items()
        for fires, given in zip((True, False), cases, strict=True)
    ]
    check(chart, tmp_path, tests)


def test_no_alert_fires_in_a_healthy_hour_and_an_upgrade_and_one_for_a_release_without_any_pod(
    chart: ChartRig, tmp_path: Path
) -> None:
    """All pods of the healthy release are replaced at 30 minutes, which takes five."""
    steady = {one["series"]: one["values"] for _, silent in CASES.values() for one in silent}
    steady |= {
        one["series"]: one["values"]
        for one in (series("nouscoder_broker_steps_total", "0+1x100"), series("nouscoder_broker_run_finished", "0x100"))
    }
    pods = [up(name, "1x29 stale _x4 1x60") for name in ("verifier", "broker", "generation", "learner")]
    healthy = [{"series": name, "values": values} for name, values in steady.items() if not name.startswith("up{")]
    tests = [firing(f"healthy at {at} minutes", [*healthy, *pods], "", 0, f"{at}m") for at in range(5, 95, 5)]
    check(chart, tmp_path, [*tests, firing("no pod, since ever", [backup("created", "0x100")], "", 1)])


def test_rules_read_only_series_that_exist_and_belong_to_the_release(chart: ChartRig) -> None:
    exported = set(samples(fresh_registries())) | COMMON | {"up"}
    exported |= {rule["record"] for rule in rules(chart) if "record" in rule}
    for rule in rules(chart):
        read = re.findall(r"(\w[\w:]*)\{([^}]*)\}", rule["expr"])
        assert read, rule
        for name, labels in read:
            if name.startswith("kubelet_volume_stats_"):
                assert labels == 'namespace="here",persistentvolumeclaim="nouscoder-redis"'
                continue
            if name.startswith("kube_cronjob_"):
                assert labels == 'namespace="here",cronjob="nouscoder-backup"'
                continue
            assert name in exported, name
            assert labels.startswith('namespace="here",app_kubernetes_io_instance="nouscoder"'), rule


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(chart: ChartRig) -> None:
    headings = re.findall(r"^#### (NousCoder\w+)$", (ROOT / "docs" / "operating.md").read_text("utf8"), re.MULTILINE)
    alerts = {rule["alert"]: rule for rule in rules(chart, runbookUrl="https://wiki/nouscoder") if "alert" in rule}
    assert sorted(headings) == sorted(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"https://wiki/nouscoder#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_rules_follow_the_values(chart: ChartRig) -> None:
    given = {rule.get("alert"): rule for rule in rules(chart, noStepMinutes=90, disabled=["NousCoderDeadLetters"])}
    assert given["NousCoderNoSteps"]["for"] == "90m"
    assert "NousCoderDeadLetters" not in given
    alone = chart.one("PrometheusRule", "nouscoder", {**ON, "loop": {"enabled": False}})
    assert "broker_" not in str(alone)
    assert "learner_" not in str(alone)
    usual = str(chart.one("PrometheusRule", "nouscoder", ON))
    assert "CertificateExpires" not in usual
    assert "Backup" not in usual
    assert "BackendLimited" not in usual
    with pytest.raises(AssertionError, match="0 resources PrometheusRule"):
        chart.one("PrometheusRule", "nouscoder", {})
    with pytest.raises(helm.HelmError, match="noStepMinutes"):
        rules(chart, noStepMinutes=0)
    few = rules(chart, disabled=[name for name in CASES if name != "NousCoderNoSteps"])
    assert [rule["alert"] for rule in few if "alert" in rule] == ["NousCoderNoSteps"]
    with pytest.raises(helm.HelmError, match="NousCoderNoStep"):
        rules(chart, disabled=["NousCoderNoStep"])


@pytest.mark.parametrize(
    ("bound", "below"),
    [(1, "0.0"), (4, "3.0"), (5, "4.0"), (8, "6.0"), (9, "8.0"), (100, "32.0"), (0, None), (None, None)],
)
def test_the_bound_of_staleness_is_that_of_a_bucket(chart: ChartRig, bound: int | None, below: str | None) -> None:
    values = {**ON, "config": {"broker": {"max_staleness": bound}}}
    groups = chart.one("PrometheusRule", "nouscoder", values)["spec"]["groups"]
    found = re.findall(r'le="([^"]*)"', str(groups))
    assert found == ([below] if below else [])
    assert ("NousCoderStalenessAtBound" in str(groups)) is (below is not None)
    if below:
        (labels,) = [
            one
            for one in samples(fresh_registries())["nouscoder_learner_rollout_staleness_versions_bucket"]
            if one["le"] == below
        ]
        assert labels
