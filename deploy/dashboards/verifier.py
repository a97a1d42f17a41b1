"""The *Verifier* dashboard: submissions, speed, sandboxes and infrastructure failures."""

from __future__ import annotations

from deploy.dashboards.panels import WINDOW, Board, Kind, Panel, Query, buckets, metric, per_second, quantiles, share
from deploy.dashboards.processes import process_row

_BUSY = f"""sum({metric("verifier_sandboxes", 'state="busy"')})"""
_USABLE = f"""sum({metric("verifier_sandboxes", 'state=~"busy|free"')})"""

_GLANCE = (
    Panel(
        "Submissions per second",
        "Submissions that got a verdict.",
        "none",
        (Query(per_second("verifier_submissions_total")),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Tests per second",
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
        "Infrastructure failures in grading, in the window. Grading is retried in another sandbox; they never become a"
        " reward.",
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
        "Verdicts per second. internal_error is an infrastructure failure; all others are the candidates' results.",
        "none",
        (Query(per_second("verifier_submissions_total", by="verdict"), "{{verdict}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Tests by outcome",
        "Tests per second, by outcome.",
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
        "Seconds from acceptance to verdict, including the wait for a sandbox.",
        "s",
        quantiles("verifier_submission_duration_seconds", WINDOW),
    ),
    Panel(
        "Test duration",
        "Wall time of one test in seconds.",
        "s",
        quantiles("verifier_test_duration_seconds", WINDOW),
    ),
    Panel(
        "Submission durations",
        "Submissions in the window, by duration.",
        "s",
        buckets("verifier_submission_duration_seconds", WINDOW),
        Kind.HEATMAP,
    ),
)

_KEPT = per_second("verifier_compile_cache_hits_total")
_COMPILED = per_second("verifier_compile_cache_misses_total")

_COMPILE_CACHE = (
    Panel(
        "Programs that were not compiled again",
        "Share of the programs in a compiled language whose source had been compiled before.",
        "percentunit",
        (Query(share(_KEPT, f"({_KEPT} + {_COMPILED})"), "share"),),
        high=1,
    ),
    Panel(
        "Compilations",
        "Programs per second that were compiled, and that were found compiled.",
        "none",
        (Query(_COMPILED, "compiled"), Query(_KEPT, "found")),
        Kind.STACKED,
    ),
    Panel(
        "Compiled programs on the disk",
        "Bytes, by gateway; at most verifier.sandbox.compile_cache_bytes each.",
        "bytes",
        (Query(f"sum by (pod) ({metric('verifier_compile_cache_bytes')})", "{{pod}}"),),
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
        "Wait for a sandbox",
        "Seconds that submissions waited, for those that got a sandbox in the window.",
        "s",
        (*quantiles("verifier_queue_wait_seconds", WINDOW),),
    ),
    Panel(
        "Oldest waiting submission",
        "Seconds that it has waited, by gateway.",
        "s",
        (Query(f"max by (pod) ({metric('verifier_queue_oldest_age_seconds')})", "{{pod}}"),),
        warn=60,
        bad=300,
    ),
    Panel(
        "Clients that wait",
        "Clients with a waiting submission, by gateway.",
        "none",
        (Query(f"sum by (pod) ({metric('verifier_queue_clients')})", "{{pod}}"),),
    ),
    Panel(
        "Submissions by client",
        "Per second, by the name in the file of tokens; itself is grading for the run.",
        "none",
        (Query(per_second("verifier_client_submissions_total", by="client"), "{{client}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Start of runners",
        "Mean seconds from the creation of a runner until it can be reached, by backend, since the gateway's start.",
        "s",
        (
            Query(
                share(
                    f"sum by (backend) ({metric('verifier_runner_start_seconds_sum')})",
                    f"sum by (backend) ({metric('verifier_runner_start_seconds_count')})",
                ),
                "{{backend}}",
            ),
        ),
    ),
    Panel(
        "Caps reached",
        "1 while a cap of cost or number allows no further container of Modal.",
        "none",
        (Query(f"max by (backend, cap) ({metric('verifier_backend_limited')})", "{{backend}} {{cap}}"),),
        high=1,
    ),
    Panel(
        "Internal errors by cause",
        "Infrastructure failures in the window: sandbox (the backend reported an error), sandbox_silent (no answer in"
        " time), grader (an error in the gateway), judge (a checker or interactor failed).",
        "none",
        (Query(f"sum by (cause) (increase({metric('verifier_internal_errors_total')}[{WINDOW}]))", "{{cause}}"),),
    ),
    Panel(
        "Runner pods by state",
        "Pods in which candidates run: starting, unproven (a canary decides), ready, lent to a slot, quarantined"
        " (failed the canary; kept for inspection). All 0 if sandboxes are not pods.",
        "none",
        (Query(f"sum by (state) ({metric('verifier_runners')})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Runner pods replaced",
        "In the window, by reason. worn (it served its number of submissions) is normal. The others are not: lost (its"
        " pod died), stuck (never started), silent (did not grade the canary), canary (graded it wrongly).",
        "none",
        (Query(f"sum by (reason) (increase({metric('verifier_runner_replacements_total')}[{WINDOW}]))", "{{reason}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Further sandboxes",
        "Sandboxes per second that were opened on idle slots for submissions that already had one.",
        "none",
        (Query(per_second("verifier_extra_lanes_total"), "sandboxes"),),
    ),
    Panel(
        "Tool sessions",
        "Open tool sessions, and those that wait because as many as allowed are open.",
        "none",
        (Query(f"sum by (state) ({metric('verifier_tool_sessions')})", "{{state}}"),),
    ),
    Panel(
        "Calls of tool sessions",
        "Per second, by how they ended. All but done ended their interpreter.",
        "none",
        (Query(per_second("verifier_tool_calls_total", by="end"), "{{end}}"),),
        Kind.STACKED,
    ),
)

VERIFIER = Board(
    uid="nouscoder-verifier",
    title="NousCoder / Verifier",
    description="The grading service: submissions, speed, sandboxes and infrastructure failures.",
    finds="nouscoder_verifier_queue_depth",
    rows=(
        ("At a glance", _GLANCE),
        ("Grading", _GRADING),
        ("Compiled programs", _COMPILE_CACHE),
        ("Sandboxes", _SANDBOXES),
        process_row("verifier"),
    ),
)
