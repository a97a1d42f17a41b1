"""The *Broker* dashboard: work that waits, leases, what was given again or given up, and Redis."""

from __future__ import annotations

from deploy.dashboards.panels import WINDOW, Board, Kind, Panel, Query, metric, per_second, share
from deploy.dashboards.processes import process_row

_FINAL = 'state=~"trained|filtered|stale|abandoned|lost"'
_NOT_TRAINED = 'state=~"filtered|stale|abandoned|lost"'


def _ended(states: str) -> str:
    return f"sum(increase({metric('broker_ledger_rollouts', states)}[{WINDOW}]))"


_GLANCE = (
    Panel(
        "Oldest work",
        "Age of the oldest rollout that is not sampled or not graded yet.",
        "s",
        (Query(f"max({metric('broker_oldest_age_seconds')})"),),
        Kind.NUMBER,
        warn=3600,
        bad=7200,
        width=4,
    ),
    Panel(
        "Admitted per second",
        "Rollouts admitted, averaged over the window.",
        "none",
        (Query(per_second("broker_admitted_rollouts_total", over=WINDOW)),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Admission slots free",
        "Rollouts that may be admitted now. 0 means that enough rollouts are in flight.",
        "none",
        (Query(f"sum({metric('broker_admission_slots_free')})"),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Ledger",
        "Whether admitted = trained + filtered + stale + abandoned + lost + in flight.",
        "none",
        (Query(f"min({metric('broker_ledger_balanced')})"),),
        Kind.NUMBER,
        warn=1,
        bad=0,
        words=("NOT BALANCED", "balanced"),
        width=4,
    ),
    Panel(
        "Redis memory",
        "Share of maxmemory in use. Above 75 % no group is admitted, above 90 % no rollout is taken.",
        "percentunit",
        (Query(f"max({metric('broker_redis_memory_used_ratio')})"),),
        Kind.NUMBER,
        warn=0.75,
        bad=0.9,
        width=4,
    ),
    Panel(
        "Accepted",
        "Share of the rollouts graded in the window that were accepted, before any filter.",
        "percentunit",
        (
            Query(
                share(
                    per_second("broker_rollouts_accepted_total", over=WINDOW),
                    per_second("broker_rollouts_graded_total", over=WINDOW),
                )
            ),
        ),
        Kind.NUMBER,
        width=4,
    ),
)

_WORK = (
    Panel(
        "Age of the oldest work",
        "By stream: tasks are rollouts to sample, grading those to grade. The time under a lease counts too.",
        "s",
        (Query(f"max by (stream) ({metric('broker_oldest_age_seconds')})", "{{stream}}"),),
    ),
    Panel(
        "Waiting",
        "Entries that nobody holds, by stream.",
        "none",
        (Query(f"sum by (stream) ({metric('broker_stream_lag')})", "{{stream}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Leased",
        "Entries under lease, by stream.",
        "none",
        (Query(f"sum by (stream) ({metric('broker_pending_leases')})", "{{stream}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Rollouts by state",
        "All rollouts of the run. Their sum is the number of those admitted.",
        "none",
        (Query(f"sum by (state) ({metric('broker_ledger_rollouts')})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Ended without training",
        "Share of the rollouts that ended in the window without being trained on: filtered, stale, abandoned, lost.",
        "percentunit",
        (Query(share(_ended(_NOT_TRAINED), _ended(_FINAL)), "not trained"),),
        high=1,
    ),
    Panel(
        "Ended without a verdict",
        "Rollouts in the window that ended because their group or the run had ended, by reason.",
        "none",
        (Query(f"sum by (reason) (increase({metric('broker_cancelled_rollouts_total')}[{WINDOW}]))", "{{reason}}"),),
        Kind.STACKED,
    ),
)

_FAILURES = (
    Panel(
        "Given again",
        "Entries in the window that were delivered again, after a lost lease or a failed grading.",
        "none",
        (Query(f"sum by (stream) (increase({metric('broker_redeliveries_total')}[{WINDOW}]))", "{{stream}}"),),
        Kind.STACKED,
        width=12,
    ),
    Panel(
        "Given up",
        "Dead letters since the start of the run. `nouscoder dead-letters list` shows them.",
        "none",
        (Query(f"sum by (stream) ({metric('broker_dead_letters_total')})", "{{stream}}"),),
        Kind.STACKED,
        width=12,
    ),
)

BROKER = Board(
    uid="nouscoder-broker",
    title="NousCoder / Broker",
    description="The state of the run: work that waits and for how long, leases, failures, and the memory of Redis.",
    finds="nouscoder_broker_policy_version",
    rows=(
        ("At a glance", _GLANCE),
        ("Work", _WORK),
        ("Failures", _FAILURES),
        process_row("broker"),
    ),
)
