"""The *Cost* dashboard: what GPUs and cores do, and what a step costs by the prices that the reader types.

A worker has the GPUs of its pod whether it samples or not. So the GPUs of a state are those of the workers, times the
share of time in that state.
"""

from __future__ import annotations

from deploy.dashboards.panels import RATE, SCOPE, WINDOW, Board, Kind, Panel, Query, Setting, metric, per_second, share
from deploy.dashboards.processes import process_row

_WORKERS = f"count({metric('generation_running_rollouts')})"
_LEARNERS = f"count({metric('learner_policy_version')})"
_IDLE = f"sum(rate({metric('generation_idle_seconds_total')}[{WINDOW}]))"
_WAITS = f"sum(rate({metric('learner_wait_seconds_total')}[{WINDOW}]))"
_GPUS = f"($gpus_generation * {_WORKERS} + $gpus_learner * {_LEARNERS})"
_CORES = f"sum(rate(process_cpu_seconds_total{{{SCOPE}}}[{WINDOW}]))"
_SLOTS = f"sum(rate({metric('verifier_backend_seconds_total')}[{WINDOW}]))"
_MODAL = f"3600 * sum(rate({metric('verifier_backend_dollars_total')}[{WINDOW}]))"
_HOUR = f"($gpu_price * {_GPUS} + $core_price * ({_CORES} + {_SLOTS}) + {_MODAL})"
_MODAL_BY_BACKEND = f"3600 * sum by (backend) (rate({metric('verifier_backend_dollars_total')}[{WINDOW}]))"
_STEPS = f"3600 * {per_second('broker_steps_total', over=WINDOW)}"

_GLANCE = (
    Panel(
        "Dollars per hour",
        "All GPUs of the workers, the cores in use, and containers of Modal, at the prices above.",
        "currencyUSD",
        (Query(_HOUR),),
        Kind.NUMBER,
        width=6,
    ),
    Panel(
        "Dollars per step",
        "Dollars per hour divided by the committed optimizer steps per hour, over the window.",
        "currencyUSD",
        (Query(share(_HOUR, _STEPS)),),
        Kind.NUMBER,
        width=6,
    ),
    Panel(
        "GPUs at work",
        "Share of the GPUs' time in which workers sample or the learner trains.",
        "percentunit",
        (
            Query(
                share(
                    f"($gpus_generation * ({_WORKERS} - {_IDLE}) + $gpus_learner * ({_LEARNERS} - {_WAITS}))",
                    _GPUS,
                )
            ),
        ),
        Kind.NUMBER,
        warn=0.9,
        bad=0.5,
        width=6,
    ),
    Panel(
        "Dollars per million tokens",
        "The cost of generation's GPUs divided by the tokens sampled, over the window.",
        "currencyUSD",
        (
            Query(
                share(
                    f"1e6 * $gpu_price * $gpus_generation * {_WORKERS}",
                    f"(3600 * {per_second('generation_tokens_total', over=WINDOW)})",
                )
            ),
        ),
        Kind.NUMBER,
        width=6,
    ),
)

_GPU_STATES = (
    Panel(
        "GPUs of generation by state",
        "GPU-hours an hour: sampling, and idle by reason.",
        "none",
        (
            Query(f"$gpus_generation * ({_WORKERS} - {_IDLE})", "sampling"),
            Query(
                f"$gpus_generation * sum by (reason) (rate({metric('generation_idle_seconds_total')}[{WINDOW}]))",
                "idle: {{reason}}",
            ),
        ),
        Kind.STACKED,
        width=12,
    ),
    Panel(
        "GPUs of the learner by state",
        "GPU-hours an hour: training, and waiting by what for.",
        "none",
        (
            Query(f"$gpus_learner * ({_LEARNERS} - {_WAITS})", "training"),
            Query(
                f"$gpus_learner * sum by (for) (rate({metric('learner_wait_seconds_total')}[{WINDOW}]))",
                "waits: {{for}}",
            ),
        ),
        Kind.STACKED,
        width=12,
    ),
)

_CPU_STATES = (
    Panel(
        "Cores of services",
        "CPU-hours an hour of the services' processes.",
        "none",
        (
            Query(
                f"sum by (app_kubernetes_io_component) (rate(process_cpu_seconds_total{{{SCOPE}}}[{RATE}]))",
                "{{app_kubernetes_io_component}}",
            ),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Slots of candidates",
        "Sandboxes in use by submissions, by backend. Each is counted as a core.",
        "none",
        (Query(f"sum by (backend) (rate({metric('verifier_backend_seconds_total')}[{WINDOW}]))", "{{backend}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Cost of containers",
        "Dollars an hour of backends that cost money, at the prices of the configuration.",
        "currencyUSD",
        (
            Query(
                f"3600 * sum by (backend) (rate({metric('verifier_backend_dollars_total')}[{WINDOW}]))", "{{backend}}"
            ),
        ),
        Kind.STACKED,
    ),
)

COST = Board(
    uid="nouscoder-cost",
    title="NousCoder / Cost",
    description="What GPUs and cores do, and what an hour, a step and a token cost. Type your prices above.",
    finds="nouscoder_broker_policy_version",
    rows=(
        ("At a glance", _GLANCE),
        ("GPU-hours by state", _GPU_STATES),
        ("CPU-hours by state", _CPU_STATES),
        process_row(),
    ),
    settings=(
        Setting("gpu_price", "Dollars per GPU-hour", "3.00"),
        Setting("core_price", "Dollars per core-hour", "0.04"),
        Setting("gpus_generation", "GPUs of a generation pod", "1"),
        Setting("gpus_learner", "GPUs of the learner", "1"),
    ),
)
