"""The grading service's section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from nouscoder.entry_points import PATTERN
from nouscoder.private_folder import temporary_folder
from nouscoder.sections import InputFile, InputPaths, OutputFile, Section, ServiceSection, grpc_address


class ModalSection(Section):
    """Backend modal: containers of modal.com, and what they may cost. Credentials: MODAL_TOKEN_ID and _SECRET."""

    app: str = Field("nouscoder-grading", description="name of the app on Modal; made if it does not exist")
    image: str = Field("", description="reference of the pushed sandbox image (make images)")
    dockerfile: InputFile = Field(
        "",
        description="without image: the Dockerfile that Modal builds: deploy/images/sandbox/Dockerfile",
    )
    registry_secret: str = Field("", description="name of a Modal Secret with the credentials of the image's registry")
    runtime: Literal["gvisor", "vm"] = Field("gvisor", description="Modal's runtime of the containers")
    container_for: Literal["pool", "problem", "submission", "test"] = Field(
        "pool",
        description="what a container serves: max_sessions submissions, those of one problem_id, one, or one test",
    )
    cores: float = Field(1.0, gt=0, description="physical cores of a container, requested and at most")
    memory_mib: int = Field(2048, ge=512, description="memory of a container, requested and at most")
    regions: tuple[str, ...] = Field((), description="Modal's regions; none: any")
    lifetime_s: float = Field(3600.0, ge=60, le=86400, description="seconds after which Modal ends a container")
    idle_s: float = Field(600.0, ge=10, description="seconds without a connection after which Modal ends a container")
    start_s: float = Field(120.0, gt=0, le=240, description="seconds in which a container must be reachable")
    max_containers: int = Field(16, ge=1, description="containers at the same time")
    creations_per_minute: int = Field(60, ge=1, description="containers that are requested in any minute")
    dollars_per_minute: float = Field(0.1, gt=0, description="dollars that all containers together may cost a minute")
    dollars: float = Field(10.0, gt=0, description="dollars that all containers may cost in one life of the service")
    dollars_per_core_s: float = Field(0.00003942, ge=0, description="price of a physical core for a second")
    dollars_per_gib_s: float = Field(0.00000672, ge=0, description="price of a GiB of memory for a second")

    @property
    def dollars_a_second(self) -> float:
        """The most that one container can cost a second, because its request is also its limit."""
        return self.cores * self.dollars_per_core_s + self.memory_mib / 1024 * self.dollars_per_gib_s


class SpillOverSection(Section):
    """A second backend, for submissions that wait too long for the first one."""

    backend: Literal["", "local", "runsc", "gvisor", "userns", "modal"] = Field(
        "", description="the second backend; empty: none"
    )
    slots: int = Field(1, ge=1, description="its submissions at the same time")
    after_s: float = Field(2.0, ge=0, le=30, description="seconds that a submission waits for the first backend")


class SandboxSection(Section):
    """The isolation of candidates."""

    backend: Literal["local", "runsc", "gvisor", "userns", "modal", "fake"] = Field(
        "local",
        description="local: namespaces of this machine; runsc: gVisor here; gvisor: runner pods of gVisor; userns:"
        " runner pods with users of their own; modal: containers of modal.com; fake: nothing runs",
    )
    slots: int = Field(0, ge=0, description="submissions at the same time; 0: the number of cores")
    python: str = Field("", description="interpreter of Python candidates; empty: the base interpreter of the service")
    site_packages: InputPaths = Field((), description="extra read-only import folders for candidates")
    runsc: str = Field("", description="backend runsc: gVisor's program; empty: PATH, then that of deploy/build-runsc")
    max_sessions: int = Field(500, ge=1, description="backends runsc, gvisor, userns, modal: submissions per sandbox")
    pool_managed: bool = Field(True, description="backends gvisor, userns: the gateway makes the runner pods itself")
    pool_template: InputFile = Field(
        "",
        description="backends gvisor, userns, managed: JSON file with the Pod of a runner, or with the SandboxClaim by"
        " which a SandboxWarmPool of agent-sandbox gives one",
    )
    pool_service: str = Field(
        "", description="backends gvisor, userns, not managed: name of the runners' headless service"
    )
    pool_port: int = Field(7070, ge=1, le=65535, description="backends gvisor, userns: port of the runners")
    pool_key_file: InputFile = Field(
        "", description="backends gvisor, userns: file with the key that gateway and runners share"
    )
    pool_accept_unproven_kernel: bool = Field(
        False, description="backend gvisor: lend runners that do not show that their kernel is gVisor's"
    )
    pool_spares: int = Field(
        1, ge=0, description="backends gvisor, userns (managed), modal: ready runners beyond the slots"
    )
    pool_min: int = Field(
        -1,
        ge=-1,
        description="backends gvisor, userns, managed: slots that keep a runner while nothing waits; the others, and"
        " with 0 the spares, only have one while they are needed; -1: all of them",
    )
    pool_idle_s: float = Field(
        120.0, gt=0, description="with pool_min: seconds of lower demand after which runners are ended"
    )
    pool_start_s: float = Field(
        240.0, gt=0, description="backends gvisor, userns, modal: limit in seconds for the first runner"
    )
    compile_cache_bytes: int = Field(
        256 * 1024**2, ge=0, description="backend local: bytes of compiled programs on the disk; 0: compile every time"
    )
    start_limit_s: float = Field(30.0, gt=0, description="seconds in which a slot must give its first answer")
    compile_time_s: float = Field(
        30.0, gt=0, description="seconds of CPU and wall time of a compiler that has a CPU; Python always has 10"
    )
    grace_s: float = Field(10.0, gt=0, description="seconds after a test's wall limit until its slot counts as lost")
    tmp_bytes: int = Field(256 * 1024**2, gt=0, description="size of a candidate's /tmp, with its output")
    modal: ModalSection = ModalSection()
    spill_over: SpillOverSection = SpillOverSection()

    def _faults(self) -> Iterator[str]:
        if self.pool_min >= 0 and not (self.backend in ("gvisor", "userns") and self.pool_managed):
            yield ("pool_min needs backend gvisor or userns, and pool_managed: only its gateway makes and ends runners")
        if self.spill_over.backend == self.backend:
            yield f"spill_over.backend must be another backend than {self.backend}"


class TlsSection(Section):
    """TLS of the grading APIs, enabled by both files. With `client_ca`, clients need certificates."""

    certificate: InputFile = Field("", description="PEM file of the service's certificate chain; empty turns TLS off")
    key: InputFile = Field("", description="PEM file of its private key")
    client_ca: InputFile = Field(
        "", description="PEM file of the authority of client certificates (mTLS); empty: no mTLS"
    )

    def _faults(self) -> Iterator[str]:
        if bool(self.certificate) != bool(self.key) or (self.client_ca and not self.certificate):
            yield "give certificate and key together, and client_ca only with them"


class TestsSection(Section):
    """Tests named by their digest: those of a run's problems, and those that clients store."""

    __test__ = False  # not a pytest class

    cache: OutputFile = Field(
        "", description="folder of fetched tests; empty: a private one, nouscoder-tests-UID, in the temporary folder"
    )
    cache_bytes: int = Field(1024**3, ge=1024**2, description="maximum bytes of fetched tests on the disk")
    store: OutputFile = Field(
        "", description="folder or URL (s3://...) of tests that clients store; empty: a folder next to the cache"
    )
    client_bytes: int = Field(1024**3, ge=0, description="bytes of tests that one client may store; 0 turns it off")
    store_bytes: int = Field(
        1024**3, ge=0, description="bytes that all clients' tests may take in the store together, compressed"
    )
    expiry_s: float = Field(7 * 86400.0, gt=0, description="seconds after their last use when stored tests are deleted")

    @property
    def folder(self) -> Path:
        """The folder of fetched tests. Raises NoFolder."""
        return Path(self.cache) if self.cache else temporary_folder("nouscoder-tests")


class JobsSection(Section):
    """Jobs: many submissions that a client sends at once and whose results it reads later."""

    folder: OutputFile = Field("", description="folder of jobs, which outlives a restart; empty turns jobs off")
    keep_minutes: float = Field(24 * 60.0, gt=0, description="minutes after its end when a job is removed")
    max_hours: float = Field(48.0, gt=0, description="hours after which a job that has not finished is ended")
    client_jobs: int = Field(16, ge=1, description="jobs of one client, with those that are kept")
    client_submissions: int = Field(200_000, ge=1, description="submissions of one client's unfinished jobs together")
    submissions: int = Field(500_000, ge=1, description="submissions of all unfinished jobs together")
    client_bytes: int = Field(4 * 1024**3, ge=1024, description="bytes of one client's jobs, requests and results")
    store_bytes: int = Field(8 * 1024**3, ge=1024, description="bytes of all jobs together")
    webhook_origins: tuple[str, ...] = Field(
        (), description="servers that may be told of a job's end, such as https://host:8443; empty turns that off"
    )
    webhook_key_file: InputFile = Field("", description="file with the key that signs what those servers are told")

    def _faults(self) -> Iterator[str]:
        if self.webhook_origins and not self.webhook_key_file:
            yield "webhook_origins needs webhook_key_file"

    @property
    def keep_s(self) -> float:
        """Seconds after its end when a job is removed."""
        return 60 * self.keep_minutes

    @property
    def max_s(self) -> float:
        """Seconds after which a job that has not finished is ended."""
        return 3600 * self.max_hours


class ToolSessionsSection(Section):
    """Tool sessions: Python interpreters in sandboxes of their own, for environments that let the policy call one."""

    sessions: int = Field(
        0,
        ge=0,
        description="open sessions at most, each with a sandbox beside verifier.sandbox.slots; 0 turns them off",
    )
    calls: int = Field(16, ge=1, description="calls of one session at most")
    call_s: float = Field(60.0, gt=0, description="seconds that one call may run; then its interpreter is ended")
    idle_s: float = Field(300.0, gt=0, description="seconds without a call after which a session ends")
    memory_bytes: int = Field(1024**3, ge=64 * 1024**2, description="memory of one interpreter")


class VerifierSection(ServiceSection):
    """The grading service."""

    grpc: str = grpc_address(50051)
    http: str = Field("", description="address of the REST API; empty turns it off")
    health: str = Field("", description="address of /healthz and /readyz alone, never encrypted; empty: only on http")
    tls: TlsSection = TlsSection()
    tokens_file: InputFile = Field(
        "", description="file of clients' tokens (nouscoder tokens new NAME); empty: no token needed"
    )
    hosts: tuple[str, ...] = Field(
        (), description="without tokens: public host names of the service and of pages that may call it"
    )
    problems: InputFile = Field(
        "", description="problem file whose problems OpenEnv and MCP clients may work on; empty: none"
    )
    audit_log: OutputFile = Field("", description="file with one JSON line per submission; empty turns it off")
    audit_source: bool = Field(False, description="write the programs to the audit log too")
    tracing_endpoint: str = Field("", description="traces: OTLP over HTTP, such as http://host:4318; empty is off")
    processes: int = Field(
        1, ge=1, le=64, description="gateway processes that share the addresses and divide slots and queue among them"
    )
    max_queue: int = Field(1024, ge=1, description="maximum number of waiting submissions; more are refused")
    cache_entries: int = Field(4096, ge=0, description="cached verdicts for identical submissions; 0 is off")
    max_submission_s: float = Field(
        600.0,
        gt=0,
        description="time limit in seconds for all tests of a submission together, with checkers and cleaning up;"
        " CPU time for math tests",
    )
    max_body_bytes: int = Field(
        8 * 1024**2,
        ge=1024,
        le=8 * 1024**2,
        description="largest JSON body; a batch or a gRPC message may have 8 times this; larger tests go to /v1/tests",
    )
    max_bodies_bytes: int = Field(
        256 * 1024**2,
        ge=1024,
        description="bytes of bodies and answers that all requests may hold together; more are refused",
    )
    drain_s: float = Field(
        10.0, ge=0, description="seconds after SIGTERM for submissions in progress to get their verdict"
    )
    leave_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which the APIs still take calls, because a Service may still send some;"
        " leases of a broker are given back at once",
    )
    libraries: tuple[str, ...] = Field(
        ("sortedcontainers", "numpy", "networkx", "pytest"),
        description="packages installed here that candidates may import",
    )
    comparators: tuple[str, ...] = Field(
        (),
        description="functions of installed packages that compare outputs, each package.module:function, which clients"
        " may name",
    )
    tests: TestsSection = TestsSection()
    sandbox: SandboxSection = SandboxSection()
    tools: ToolSessionsSection = ToolSessionsSection()
    jobs: JobsSection = JobsSection()

    def _faults(self) -> Iterator[str]:
        if self.processes > 1:
            yield from self._faults_of_processes("needs verifier.processes = 1")
        for name in self.comparators:
            if not re.fullmatch(PATTERN, name):
                yield f"comparators has {name!r}, which is not package.module:function"
        if self.max_bodies_bytes < self.max_body_bytes:
            yield "max_bodies_bytes must be at least max_body_bytes"

    def _faults_of_processes(self, one: str) -> Iterator[str]:
        if self.jobs.folder:
            yield f"jobs.folder {one}: a job's submissions are queued by one process"
        if self.tools.sessions:
            yield f"tools.sessions {one}: one process counts the open sessions"
        if self.sandbox.backend not in ("local", "fake") or self.sandbox.spill_over.backend:
            yield f"a sandbox.backend other than local, and sandbox.spill_over, {one}: one process lends them"
        if self.sandbox.slots and self.sandbox.slots < self.processes:
            yield "sandbox.slots must be at least verifier.processes, because each process has its own"
        if self.max_queue < self.processes:
            yield "max_queue must be at least verifier.processes, because each process has its share"
        if self.max_bodies_bytes // self.processes < self.max_body_bytes:
            yield "max_bodies_bytes must be at least max_body_bytes times verifier.processes"

    def not_served(self, with_broker: bool) -> list[str]:
        """What the service does not do, each with the key or option that turns it on."""
        off = {
            "REST API and playground (--http HOST:PORT)": not self.http,
            "jobs (verifier.jobs.folder)": not self.jobs.folder,
            "tool sessions (verifier.tools.sessions)": not self.tools.sessions,
            "problems for OpenEnv and MCP (verifier.problems)": not self.problems,
            "rollouts of a broker (--broker)": not with_broker,
            "TLS (verifier.tls)": not self.tls.certificate,
            "audit log (verifier.audit_log)": not self.audit_log,
            "traces (verifier.tracing_endpoint)": not self.tracing_endpoint,
        }
        return [name for name, is_off in off.items() if is_off]
