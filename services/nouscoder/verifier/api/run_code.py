"""POST /run_code: one run of one program, with the request and response of SandboxFusion, so that its clients work.

Differences from SandboxFusion: the program cannot change the files that were sent, `fetch_files` are plain names,
`compile_timeout` is ignored because the service has its own compile limit, and a program that prints more than 8 MiB is
stopped.

A run waits for a slot. When it gets none in time, or other work kept its compiler from the CPU, the answer is 504: verl
and SandboxFusion's client send the request again after a 504, while verl counts every other refusal as a wrong program.
So a busy service is never a reward.
"""

from __future__ import annotations

import base64
import binascii
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission, language_name
from nouscoder.errors import plain_fault
from nouscoder.formats.body import MOST_FAULTS, ListOf, first_fault
from nouscoder.formats.json_values import ValueCount, with_whole_characters
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.api.streaming import QUEUE_PATIENCE_S, while_full
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.sandbox.base import CompileFailed, CompileStarved, Exit, Program, RunResult, SandboxError
from nouscoder.verifier.toolchains.languages import installed

_CPU_PER_WALL = 8.0  # SandboxFusion limits only wall time, and threads may use several cores
_OUTPUT_BYTES = 8 * 1024**2  # of stdout and of stderr
_SPARE_S = 4.0  # verl gives up 10 s after the two timeouts; the rest is for an exclusive run and the way
_BOUNDS = Bounds()
_STOPPED = {
    Exit.MEMORY_LIMIT: "stopped: over the memory limit",
    Exit.OUTPUT_LIMIT: "stopped: over the output limit",
}


class RunCodeRequest(BaseModel):
    """One run. Unknown fields are ignored, as in SandboxFusion. A null is the default, as from verl."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: float = Field(10.0, gt=0, description="accepted; the service's own limit applies")
    run_timeout: float = Field(10.0, gt=0, description="wall seconds")
    memory_limit_MB: int = Field(-1, description="MiB; -1 is the default limit")  # noqa: N815  (SandboxFusion's name)
    files: dict[str, str | None] = Field({}, description="plain file name to base64 of its content")
    fetch_files: ListOf[str] = Field([], max_length=64, description="plain names of files that the program writes")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body

    def program(self) -> Program:
        """The program for the sandbox. Raises InvalidSubmission naming the invalid field."""
        language = language_name(self.language)
        memory_bytes = self.memory_limit_MB * 1024**2 if self.memory_limit_MB > 0 else Limits().memory_bytes
        cpu_time_s = max(self.run_timeout, min(_BOUNDS.limits.cpu_time_s, _CPU_PER_WALL * self.run_timeout))
        limits = Limits(self.run_timeout, cpu_time_s, memory_bytes, _OUTPUT_BYTES)
        validate(Submission(StdinTests((StdinCase("", ""),)), self.code, language=language, limits=limits), _BOUNDS)
        try:
            return Program(installed()[language], self.code, limits, fetch=tuple(dict.fromkeys(self.fetch_files)))
        except ValueError as error:
            raise InvalidSubmission("fetch_files", str(error)) from None

    @property
    def slot_patience_s(self) -> float:
        """Seconds that the request may wait for a slot.

        verl gives up `compile_timeout + run_timeout + 10` seconds after it has sent the request. An interpreted program
        does not need `compile_timeout`.
        """
        is_compiled = installed()[language_name(self.language)].compile is not None
        return min(QUEUE_PATIENCE_S, _SPARE_S + (0.0 if is_compiled else self.compile_timeout))

    def contents(self) -> dict[str, bytes]:
        """The decoded files by name. Raises InvalidSubmission naming the invalid one."""
        found = {}
        for name, text in self.files.items():
            try:
                if text is not None:
                    found[name] = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidSubmission(f"files.{name:.80}", "not base64") from None
        return found


class RunStatus(StrEnum):
    """The status of the whole request."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    """The status of one command."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class CommandResult(BaseModel):
    """The result of one command: the compiler or the program."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(BaseModel):
    """The answer to a RunCodeRequest."""

    status: RunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}

    @property
    def memory_bytes(self) -> int:
        """What its texts take in memory."""
        commands = [one for one in (self.compile_result, self.run_result) if one is not None]
        outputs = [text for one in commands for text in (one.stdout, one.stderr) if text is not None]
        return sum(map(sys.getsizeof, (self.message, *outputs, *self.files.values())))


def parse_run_code(body: bytes, _values: ValueCount | None = None) -> RunCodeRequest:
    """Parse a request's JSON. No text inside it is decoded. Raises InvalidSubmission naming the invalid field."""
    try:
        return RunCodeRequest.model_validate_json(with_whole_characters(body))
    except ValidationError as error:
        if error.error_count() > MOST_FAULTS:
            raise InvalidSubmission(*first_fault(error)) from None
        fault = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        raise InvalidSubmission(field, plain_fault(fault["msg"])) from None


class CodeRunner:
    """Runs programs in the slots of `grader`, within the callers' quotas, and writes an audit line for each."""

    def __init__(self, grader: Grader, quotas: Quotas, audit: AuditLog | None = None) -> None:
        self._grader = grader
        self._quotas = quotas
        self._audit = audit

    async def run(self, request: RunCodeRequest) -> RunCodeAnswer:
        """Run one program.

        Raises InvalidSubmission, QueueFull when there is no slot or quota in time, and CompileStarved.
        """
        begun_s = time.monotonic()
        answer: RunCodeAnswer | None = None
        refused = ""
        try:
            answer = await self._patient_answer(request)
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

    async def _patient_answer(self, request: RunCodeRequest) -> RunCodeAnswer:
        program, files = request.program(), request.contents()
        stdin = (request.stdin or "").encode("utf8", "surrogatepass")
        end_s = time.monotonic() + request.slot_patience_s
        with ExitStack() as stack:

            async def enter() -> None:
                stack.enter_context(self._quotas.admitted(current_caller()))

            await while_full(enter, request.slot_patience_s)
            left_s = end_s - time.monotonic()
            return await while_full(lambda: self._answer(program, stdin, files, end_s - time.monotonic()), left_s)

    async def _answer(
        self, program: Program, stdin: bytes, files: Mapping[str, bytes], slot_patience_s: float
    ) -> RunCodeAnswer:
        try:
            result, compile_s = await self._grader.run_once(program, stdin, files, slot_patience_s)
        except CompileFailed as failure:
            return _not_compiled(program, failure)
        except CompileStarved:
            raise
        except SandboxError as error:
            return RunCodeAnswer(status=RunStatus.SANDBOX_ERROR, message=str(error))
        except ValueError as error:
            raise InvalidSubmission("files", str(error)) from None
        ran = _command(result)
        compiled = None
        if program.language.compile is not None:
            said = result.compiler_output.decode("utf8", "replace")
            compiled = CommandResult(
                status=CommandStatus.FINISHED, execution_time=compile_s, return_code=0, stdout="", stderr=said
            )
        good = ran.status is CommandStatus.FINISHED and ran.return_code == 0
        status = RunStatus.SUCCESS if good else RunStatus.FAILED
        missing = [name for name in program.fetch if name not in result.files]
        return RunCodeAnswer(
            status=status,
            message=f"not fetched, because they are no files or too large: {', '.join(missing)}" if missing else "",
            compile_result=compiled,
            run_result=ran,
            files={name: base64.b64encode(content).decode() for name, content in result.files.items()},
        )


def _not_compiled(program: Program, failure: CompileFailed) -> RunCodeAnswer:
    """The answer for code that does not compile. In SandboxFusion, Python that does not parse is a failed run."""
    failed = CommandResult(
        status=CommandStatus.FINISHED,
        execution_time=failure.wall_time_s,
        return_code=1,
        stdout="",
        stderr=failure.detail,
    )
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
