"""The *Run* dashboard: whether the policy learns, the states of the rollouts, and what the next step waits for."""

from __future__ import annotations

from deploy.dashboards.panels import (
    RATE,
    WINDOW,
    Board,
    Kind,
    Panel,
    Query,
    buckets,
    metric,
    per_second,
    quantiles,
    share,
)
from deploy.dashboards.processes import process_row

_ACCEPTED = 'correct="true"'
_NOT_ACCEPTED = 'correct="false"'
_FINAL = 'state=~"trained|filtered|stale|abandoned|lost"'
_IN_FLIGHT = 'state!~"trained|filtered|stale|abandoned|lost"'

_GLANCE = (
    Panel(
        "Steps",
        "Optimizer steps of all committed batches, including those before restarts.",
        "none",
        (Query(f"max({metric('broker_steps_total')})"),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Since the last step",
        "Seconds since the learner's last optimizer step, or since its start. After the end of the run it only grows.",
        "s",
        (Query(f"time() - max({metric('learner_last_step_timestamp_seconds')})"),),
        Kind.NUMBER,
        warn=300,
        bad=900,
        width=4,
    ),
    Panel(
        "Run",
        "The state of the run, from the broker.",
        "none",
        (Query(f"max({metric('broker_run_finished')})"),),
        Kind.NUMBER,
        words=("in progress", "finished"),
        width=4,
    ),
    Panel(
        "Ledger",
        "admitted = trained + filtered + stale + abandoned + lost + in flight. If it is not balanced, report a defect.",
        "none",
        (Query(f"min({metric('broker_ledger_balanced')})"),),
        Kind.NUMBER,
        warn=1,
        bad=0,
        words=("NOT BALANCED", "balanced"),
        width=4,
    ),
    Panel(
        "Pass rate",
        "Share of accepted rollouts in the last trained batch; 0 before the first.",
        "percentunit",
        (Query(f"max({metric('learner_pass_rate')})"),),
        Kind.NUMBER,
        width=4,
    ),
    Panel(
        "Dead letters",
        "Rollouts given up after too many deliveries, over the whole run. No worker could process them; the broker's"
        " log names them.",
        "none",
        (Query(f"sum({metric('broker_dead_letters_total')})"),),
        Kind.NUMBER,
        warn=1,
        bad=10,
        width=4,
    ),
)

_LEARNING = (
    Panel(
        "Pass rate",
        "Trained: share of accepted rollouts in the last batch, after groups with equal rewards were filtered. All"
        " groups: of those that became complete while this batch gathered, also the filtered ones. Graded: share of"
        " accepted rollouts among all that got a verdict in the window.",
        "percentunit",
        (
            Query(f"max({metric('learner_pass_rate')})", "trained"),
            Query(f"max({metric('learner_all_groups_pass_rate')})", "all groups"),
            Query(
                share(
                    f"sum(rate({metric('broker_rollouts_accepted_total')}[{WINDOW}]))",
                    f"sum(rate({metric('broker_rollouts_graded_total')}[{WINDOW}]))",
                ),
                "graded",
            ),
        ),
        high=1,
    ),
    Panel(
        "Reward",
        "Mean reward of the last batch, and of all groups that became complete while it gathered.",
        "none",
        (
            Query(f"max({metric('learner_reward_mean')})", "trained"),
            Query(f"max({metric('learner_all_groups_reward_mean')})", "all groups"),
        ),
        low=None,
    ),
    Panel(
        "Evaluation",
        "pass@k of the newest evaluated policy on held-out problems, and the standard error of its pass@1. 0 before the"
        " first evaluation.",
        "percentunit",
        (
            Query(f"max by (k) ({metric('learner_evaluation_pass_at_k')})", "pass@{{k}}"),
            Query(f"max({metric('learner_evaluation_standard_error')})", "standard error"),
        ),
        high=1,
    ),
    Panel(
        "Evaluated version",
        "The newest policy version that was evaluated, -1 before the first, and the newest that is published.",
        "none",
        (
            Query(f"max({metric('learner_evaluation_policy_version')})", "evaluated"),
            Query(f"max({metric('learner_policy_version')})", "published"),
        ),
        low=None,
    ),
    Panel(
        "Solved groups",
        "pass@G: share of groups with an accepted rollout, of the last batch and of all groups meanwhile.",
        "percentunit",
        (Query(f"max by (groups) ({metric('learner_pass_at_g')})", "{{groups}}"),),
        high=1,
    ),
    Panel(
        "Entropy",
        "Mean entropy of the loss tokens, in nats. At 0 the policy has stopped exploring.",
        "none",
        (Query(f"max({metric('learner_entropy')})", "entropy"),),
    ),
    Panel(
        "Response length",
        "Mean tokens per rollout of the last batch, for accepted and other rollouts. 0 until a batch has one of them.",
        "none",
        (
            Query(f"max({metric('learner_response_length_tokens', _ACCEPTED)})", "accepted"),
            Query(f"max({metric('learner_response_length_tokens', _NOT_ACCEPTED)})", "not accepted"),
        ),
    ),
    Panel(
        "Importance ratio",
        "pi_theta / pi_old over the loss tokens of the last step; mismatch is pi_old / pi_sampler. Both should be about"
        " 1.",
        "none",
        (Query(f"max by (stat) ({metric('learner_importance_ratio')})", "{{stat}}"),),
    ),
    Panel(
        "Effective sample size",
        "Share of the loss tokens that is effective under the importance weights, in (0, 1].",
        "percentunit",
        (Query(f"max({metric('learner_effective_sample_size')})", "share"),),
        high=1,
        warn=0.5,
        bad=0.1,
    ),
    Panel(
        "Clip fraction",
        "Share of loss tokens whose gradient the lower or the higher clip removed.",
        "percentunit",
        (Query(f"max by (side) ({metric('learner_clip_fraction')})", "{{side}}"),),
    ),
    Panel(
        "Gradient norm",
        "Norm of the gradient before it is capped.",
        "none",
        (Query(f"max({metric('learner_gradient_norm')})", "norm"),),
    ),
    Panel(
        "Staleness",
        "Policy versions between a rollout's oldest token and its training, for rollouts trained in the window.",
        "none",
        quantiles("learner_rollout_staleness_versions", WINDOW),
    ),
)

_FLOW = (
    Panel(
        "Rollouts in flight",
        "Rollouts in flight by state. Many rollouts in one state mean that the next stage is too slow.",
        "none",
        (Query(f"sum by (state) ({metric('broker_ledger_rollouts', _IN_FLIGHT)})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Rollouts ended",
        "Final states of rollouts since the start of the run.",
        "none",
        (Query(f"sum by (state) ({metric('broker_ledger_rollouts', _FINAL)})", "{{state}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Admission slots free",
        "Rollouts that may be admitted now. 0 means that enough rollouts are in flight.",
        "none",
        (Query(f"sum({metric('broker_admission_slots_free')})", "free"),),
    ),
    Panel(
        "Stream lag",
        "Entries without a lease: work that waits for a worker.",
        "none",
        (Query(f"sum by (stream) ({metric('broker_stream_lag')})", "{{stream}}"),),
    ),
    Panel(
        "Pending leases",
        "Entries under lease: work that a worker holds.",
        "none",
        (Query(f"sum by (stream) ({metric('broker_pending_leases')})", "{{stream}}"),),
    ),
    Panel(
        "Redeliveries and dead letters",
        "Entries delivered again after a lost lease or a failed grading, and entries given up, in the window.",
        "none",
        (
            Query(f"sum by (stream) (increase({metric('broker_redeliveries_total')}[{WINDOW}]))", "{{stream}} again"),
            Query(
                f"sum by (stream) (increase({metric('broker_dead_letters_total')}[{WINDOW}]))", "{{stream}} given up"
            ),
        ),
    ),
    Panel(
        "Staleness of trained rollouts",
        "Rollouts trained in the window, by staleness in policy versions.",
        "none",
        buckets("learner_rollout_staleness_versions", WINDOW),
        Kind.HEATMAP,
        width=24,
    ),
)

_SPEED = (
    Panel(
        "Steps per minute",
        "Optimizer steps per minute, averaged over the window. If more are taken than committed, batches are trained"
        " again.",
        "none",
        (
            Query(f"60 * {per_second('broker_steps_total', over=WINDOW)}", "committed"),
            Query(f"60 * {per_second('learner_steps_total', over=WINDOW)}", "taken by the learner"),
        ),
    ),
    Panel(
        "Tokens per second",
        "Tokens per second that all generation workers sample, and that the learner trains on (in its last batch).",
        "none",
        (
            Query(per_second("generation_tokens_total"), "generation"),
            Query(f"max({metric('learner_tokens_per_second')})", "learner"),
        ),
    ),
    Panel(
        "Running rollouts",
        "Rollouts being decoded, by generation pod.",
        "none",
        (Query(f"sum by (pod) ({metric('generation_running_rollouts')})", "{{pod}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Policy version",
        "Newest version that the learner has published, that the broker knows, and that every generation worker has.",
        "none",
        (
            Query(f"max({metric('learner_policy_version')})", "learner"),
            Query(f"max({metric('broker_policy_version')})", "broker"),
            Query(f"min({metric('generation_policy_version')})", "generation, oldest"),
        ),
        low=None,
    ),
    Panel(
        "Policy update",
        "Seconds for which decoding was stopped to load new weights, in the window.",
        "s",
        quantiles("generation_policy_update_seconds", WINDOW),
    ),
    Panel(
        "Learner waits",
        "Share of time in which the learner did not train, by reason. If mostly batch, generation or grading is too"
        " slow.",
        "percentunit",
        (Query(f"sum by (for) (rate({metric('learner_wait_seconds_total')}[{WINDOW}]))", "{{for}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Generation idle",
        "Share of time in which generation workers decoded nothing, by reason. If mostly no_tasks, the learner or"
        " grading is too slow, or the run is finished.",
        "percentunit",
        (Query(f"avg by (reason) (rate({metric('generation_idle_seconds_total')}[{RATE}]))", "{{reason}}"),),
        Kind.STACKED,
    ),
    Panel(
        "Model FLOPs utilization",
        "Model FLOPs of training as a share of the device's peak, in the last batch.",
        "percentunit",
        (Query(f"max({metric('learner_mfu')})", "learner"),),
    ),
    Panel(
        "Rollouts graded per second",
        "Verdicts that the broker took, per second.",
        "none",
        (
            Query(per_second("broker_rollouts_graded_total"), "graded"),
            Query(per_second("broker_rollouts_accepted_total"), "accepted"),
        ),
    ),
)

_API = (
    Panel(
        "API requests",
        "Requests per second to the API in OpenAI's form (generation.openai), by status code. 4xx: the request cannot"
        " be honoured; 429: too many at a time.",
        "none",
        (Query(f"sum by (status) (rate({metric('generation_api_requests_total')}[{RATE}]))", "{{status}}"),),
        Kind.STACKED,
    ),
    Panel(
        "API tokens",
        "Tokens per second of that API: of prompts, and of completions that ended.",
        "none",
        (Query(f"sum by (kind) (rate({metric('generation_api_tokens_total')}[{RATE}]))", "{{kind}}"),),
        Kind.STACKED,
    ),
)

RUN = Board(
    uid="nouscoder-run",
    title="NousCoder / Run",
    description="One run: whether it learns, the states of its rollouts, and what the next step waits for.",
    finds="nouscoder_broker_policy_version",
    rows=(
        ("At a glance", _GLANCE),
        ("Learning", _LEARNING),
        ("Rollouts", _FLOW),
        ("Speed and waits", _SPEED),
        ("API in OpenAI's form", _API),
        process_row(),
    ),
)
