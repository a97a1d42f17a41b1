"""The *Verifier* dashboard: what is graded, how fast, in which sandboxes, and what of it is our failure."""

from __future__ import annotations

from deploy.dashboards.panels import WINDOW, Board, Kind, Panel, Query, buckets, metric, per_second, quantiles, share
from deploy.dashboards.processes import process_row

_BUSY = f"""sum({metric("verifier_sandboxes", 'state="busy"')})"""
_USABLE = f"""sum({metric("verifier_sandboxes", 'state=~"busy|free"')})"""

_GLANCE = (
    Panel(
        "Submissions a second",
        "Submissions that got a verdict.",
        "none",
        (Query(per_second("verifier_submissions_total")),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Tests a second",
        "Tests run.",
        "none",
        (Query(per_second("verifier_tests_total")),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Sandboxes busy",
        "Share of the usable sandboxes that run a submission. At 100 % submissions wait.",
        "percentunit",
        (Query(share(_BUSY, _USABLE)),),
        Kind.NUMBER,
        warn=0.9,
        width=4,
    ),
    Panel(
        "Waiting",
        "Submissions that wait for a sandbox.",
        "none",
        (Query(f"sum({metric('verifier_queue_depth')})"),),
        Kind.NUMBER,
        warn=100,
        bad=500,
        width=4,
    ),
    Panel(
        "Internal errors",
        "Failures of ours while grading, in the window. They are tried again elsewhere and never become a reward.",
        "none",
        (Query(f"sum(increase({metric('verifier_internal_errors_total')}[{WINDOW}]))"),),
        Kind.NUMBER,
        warn=1,
        bad=10,
        width=4,
    ),
    Panel(
        "Gateways",
        "Verifier processes that answer Prometheus.",
        "none",
        (Query(f"count({metric('verifier_queue_depth')})"),),
        Kind.NUMBER,
        width=4,
    ),
)

_GRADING = (
    Panel(
        "Submissions by verdict",
        "Verdicts a second. internal_error is ours; all others are the candidates'.",
        "none",
        (Query(per_second("verifier_submissions_total", by="verdict"), "{{verdict}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Tests by outcome",
        "Tests a second, by what the process did or whether its answer was right.",
        "none",
        (Query(per_second("verifier_tests_total", by="outcome"), "{{outcome}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Answered from the cache",
        "Share of submissions that were identical to an earlier one.",
        "percentunit",
        (Query(share(per_second("verifier_cache_hits_total"), per_second("verifier_submissions_total")), "share"),),
        high=1,
    ),
    Panel(
        "Submission duration",
        "Seconds from acceptance to verdict, the wait for a sandbox included.",
        "s",
        quantiles("verifier_submission_duration_seconds", WINDOW),
    ),
    Panel(
        "Test duration",
        "Wall seconds of one test.",
        "s",
        quantiles("verifier_test_duration_seconds", WINDOW),
    ),
    Panel(
        "Submission durations",
        "Submissions in the window, by how long they took.",
        "s",
        buckets("verifier_submission_duration_seconds", WINDOW),
        Kind.HEATMAP,
    ),
)

_SANDBOXES = (
    Panel(
        "Sandboxes by state",
        "Slots of all gateways, each for one submission at a time.",
        "none",
        (Query(f"sum by (state) ({metric('verifier_sandboxes')})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Queue depth",
        "Submissions that wait for a sandbox, by gateway.",
        "none",
        (Query(f"sum by (pod) ({metric('verifier_queue_depth')})", "{{pod}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Internal errors by cause",
        "Failures of ours in the window: sandbox (the backend said so), sandbox_silent (no answer in time), grader (a"
        " fault in the gateway), judge (a checker or interactor failed).",
        "none",
        (Query(f"sum by (cause) (increase({metric('verifier_internal_errors_total')}[{WINDOW}]))", "{{cause}}"),),
    ),
    Panel(
        "Runner pods by state",
        "Pods of the RuntimeClass that candidates run in: starting, unproven (a canary decides), ready, lent to a slot,"
        " quarantined (failed the canary; kept for you). All 0 where sandboxes are no pods.",
        "none",
        (Query(f"sum by (state) ({metric('verifier_runners')})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Runner pods replaced",
        "In the window, by reason. worn (it served its number of submissions) is the rule; lost (its pod died), stuck"
        " (never came up), silent and canary (did not grade a known program, or did so wrongly) are not.",
        "none",
        (Query(f"sum by (reason) (increase({metric('verifier_runner_replacements_total')}[{WINDOW}]))", "{{reason}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Extra lanes",
        "Sandboxes a second that were opened beside a submission's first, on idle slots.",
        "none",
        (Query(per_second("verifier_extra_lanes_total"), "lanes"),),
    ),
)

VERIFIER = Board(
    uid="nouscoder-verifier",
    title="NousCoder / Verifier",
    description="The grading service: what is graded, how fast, in which sandboxes, and what fails on our side.",
    finds="nouscoder_verifier_queue_depth",
    rows=(
        ("At a glance", _GLANCE),
        ("Grading", _GRADING),
        ("Sandboxes", _SANDBOXES),
        process_row("verifier"),
    ),
)
