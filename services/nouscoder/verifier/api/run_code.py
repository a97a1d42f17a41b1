"""POST /run_code: one run of one program, in the request and response of SandboxFusion, so that its clients work here.

Differences: the working folder is read-only for what was sent, `fetch_files` must be empty, and the time to compile is
the service's own limit, whatever `compile_timeout` says.
"""

from __future__ import annotations

import base64
import binascii
import time
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.sandbox.base import CompileFailed, Exit, Program, RunResult, SandboxError
from nouscoder.verifier.toolchains.languages import installed

SANDBOX_FUSION_NAMES = {"nodejs": "javascript"}  # theirs: ours
_CPU_A_WALL = 8.0  # SandboxFusion limits wall time alone; threads may use several cores
_BOUNDS = Bounds()
_STOPPED = {
    Exit.MEMORY_LIMIT: "stopped: over the memory limit",
    Exit.OUTPUT_LIMIT: "stopped: over the output limit",
}


class RunCodeRequest(BaseModel):
    """One run. Unknown fields are ignored, as SandboxFusion does."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: float = Field(10.0, gt=0, description="accepted; the service's own limit applies")
    run_timeout: float = Field(10.0, gt=0, description="wall seconds")
    memory_limit_MB: int = Field(-1, description="MiB; -1 is the default limit")  # noqa: N815  (their name)
    files: dict[str, str | None] = Field({}, description="plain file name to base64 of its content")
    fetch_files: list[str] = Field([], max_length=0, description="not supported: must be empty")

    def program(self) -> Program:
        """What the sandbox is to run. Raises InvalidSubmission naming the field at fault."""
        language = SANDBOX_FUSION_NAMES.get(self.language, self.language)
        memory_bytes = self.memory_limit_MB * 1024**2 if self.memory_limit_MB > 0 else Limits().memory_bytes
        most_s = _BOUNDS.limits.cpu_time_s
        limits = Limits(self.run_timeout, max(self.run_timeout, min(most_s, _CPU_A_WALL * self.run_timeout)))
        limits = Limits(limits.wall_time_s, limits.cpu_time_s, memory_bytes)
        validate(Submission(StdinTests((StdinCase("", ""),)), self.code, language=language, limits=limits), _BOUNDS)
        return Program(installed()[language], self.code, limits)

    def contents(self) -> dict[str, bytes]:
        """The files. Raises InvalidSubmission naming the one at fault."""
        found = {}
        for name, text in self.files.items():
            try:
                if text is not None:
                    found[name] = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidSubmission(f"files.{name:.80}", "not base64") from None
        return found


class RunStatus(StrEnum):
    """How the request went."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    """How one command went."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class CommandResult(BaseModel):
    """One command: the compiler, or the program."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(BaseModel):
    """What became of it."""

    status: RunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def parse_run_code(body: bytes) -> RunCodeRequest:
    """A request's JSON. Raises InvalidSubmission naming the field at fault."""
    try:
        return RunCodeRequest.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        raise InvalidSubmission(field, fault["msg"]) from None


class CodeRunner:
    """Runs programs in the slots of `grader`, within the quotas of callers, each with a line in the audit log."""

    def __init__(self, grader: Grader, quotas: Quotas, audit: AuditLog | None = None) -> None:
        self._grader = grader
        self._quotas = quotas
        self._audit = audit

    async def run(self, request: RunCodeRequest) -> RunCodeAnswer:
        """One run. Raises InvalidSubmission, QueueFull and QuotaExceeded."""
        begun_s = time.monotonic()
        answer: RunCodeAnswer | None = None
        refused = ""
        try:
            with self._quotas.admitted(current_caller()):
                answer = await self._answer(request)
            return answer
        except BaseException as error:
            refused = type(error).__name__
            raise
        finally:
            if self._audit is not None:
                self._audit.write(
                    request.code,
                    language=request.language,
                    num_tests=0,
                    verdict=None if answer is None else answer.status.value,
                    refused=refused,
                    duration_s=round(time.monotonic() - begun_s, 6),
                )

    async def _answer(self, request: RunCodeRequest) -> RunCodeAnswer:
        program, files = request.program(), request.contents()
        compiled = (
            None if program.language.compile is None else CommandResult(status=CommandStatus.FINISHED, return_code=0)
        )
        try:
            result = await self._grader.run_once(program, (request.stdin or "").encode("utf8", "surrogatepass"), files)
        except CompileFailed as failure:
            return _not_compiled(program, failure.detail)
        except SandboxError as error:
            return RunCodeAnswer(status=RunStatus.SANDBOX_ERROR, message=str(error))
        except ValueError as error:
            raise InvalidSubmission("files", str(error)) from None
        ran = _command(result)
        good = ran.status is CommandStatus.FINISHED and ran.return_code == 0
        status = RunStatus.SUCCESS if good else RunStatus.FAILED
        return RunCodeAnswer(status=status, compile_result=compiled, run_result=ran)


def _not_compiled(program: Program, detail: str) -> RunCodeAnswer:
    """Python has no compiler of its own there: code that does not parse is a run that failed."""
    failed = CommandResult(status=CommandStatus.FINISHED, execution_time=0.0, return_code=1, stdout="", stderr=detail)
    if program.language.run is None:
        return RunCodeAnswer(status=RunStatus.FAILED, run_result=failed)
    return RunCodeAnswer(status=RunStatus.FAILED, compile_result=failed)


def _command(result: RunResult) -> CommandResult:
    stderr = result.stderr.decode("utf8", "replace")
    late = result.exit is Exit.TIME_LIMIT
    if result.exit in _STOPPED:
        stderr += f"\n{_STOPPED[result.exit]}"
    code = result.exit_code if result.exit is Exit.EXITED else -(result.signal or 9)
    return CommandResult(
        status=CommandStatus.TIME_LIMIT_EXCEEDED if late else CommandStatus.FINISHED,
        execution_time=result.wall_time_s,
        return_code=None if late else code,
        stdout=result.stdout.decode("utf8", "replace"),
        stderr=stderr,
    )
