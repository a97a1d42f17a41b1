"""The *Generation* dashboard: tokens, why workers do not sample, and how new policies reach them."""

from __future__ import annotations

from deploy.dashboards.panels import RATE, WINDOW, Board, Kind, Panel, Query, metric, per_second, quantiles
from deploy.dashboards.processes import process_row

_IDLE = f"rate({metric('generation_idle_seconds_total')}[{RATE}])"

_GLANCE = (
    Panel(
        "Tokens per second",
        "Tokens that all workers sample.",
        "none",
        (Query(per_second("generation_tokens_total")),),
        Kind.NUMBER,
        width=6,
    ),
    Panel(
        "Workers",
        "Workers that answer Prometheus.",
        "none",
        (Query(f"count({metric('generation_running_rollouts')})"),),
        Kind.NUMBER,
        width=6,
    ),
    Panel(
        "Idle",
        "Share of time in which workers decoded nothing, over all workers.",
        "percentunit",
        (Query(f"avg(sum by (pod) ({_IDLE}))"),),
        Kind.NUMBER,
        warn=0.1,
        bad=0.3,
        width=6,
    ),
    Panel(
        "Behind the learner",
        "Policy versions between the newest one and that of the oldest worker.",
        "none",
        (Query(f"max({metric('broker_policy_version')}) - min({metric('generation_policy_version')})"),),
        Kind.NUMBER,
        warn=2,
        bad=5,
        width=6,
    ),
)

_SAMPLING = (
    Panel(
        "Tokens per second by worker",
        "A worker far below the others has a slow device or few rollouts.",
        "none",
        (Query(f"sum by (pod) (rate({metric('generation_tokens_total')}[{RATE}]))", "{{pod}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Rollouts in decoding",
        "By worker. At most config.generation.max_running of each.",
        "none",
        (Query(f"sum by (pod) ({metric('generation_running_rollouts')})", "{{pod}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Idle by reason",
        "Share of time, averaged over workers. no_tasks: the learner or grading is slower, or the run is finished.",
        "percentunit",
        (Query(f"avg by (reason) ({_IDLE})", "{{reason}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Tokens of unfinished rollouts",
        "Per second: saved at the broker, continued by another worker, dropped because tool or prompt was different.",
        "none",
        (Query(per_second("generation_partial_tokens_total", by="fate"), "{{fate}}"),),
    ),
)

_POLICIES = (
    Panel(
        "Policy version by worker",
        "The version that each worker samples from, and the newest one.",
        "none",
        (
            Query(f"max by (pod) ({metric('generation_policy_version')})", "{{pod}}"),
            Query(f"max({metric('broker_policy_version')})", "newest"),
        ),
        low=None,
    ),
    Panel(
        "Update",
        "Seconds for which decoding stood still for new weights, in the window.",
        "s",
        quantiles("generation_policy_update_seconds", WINDOW),
    ),
    Panel(
        "Fetch",
        "Seconds to fetch a policy from the learner, waiting for it included, in the window.",
        "s",
        quantiles("generation_policy_fetch_seconds", WINDOW),
    ),
    Panel(
        "Fetches by result",
        "In the window. changes: only what changed; from_memory: not through files; not_from_memory: that had failed.",
        "none",
        (Query(f"sum by (result) (increase({metric('generation_policy_fetches_total')}[{WINDOW}]))", "{{result}}"),),
        Kind.STACKED,
    ),
)

GENERATION = Board(
    uid="nouscoder-generation",
    title="NousCoder / Generation",
    description="Sampling: tokens, why workers do not sample, and how new policies reach them.",
    finds="nouscoder_generation_policy_version",
    rows=(
        ("At a glance", _GLANCE),
        ("Sampling", _SAMPLING),
        ("Policies", _POLICIES),
        process_row("generation"),
    ),
)
