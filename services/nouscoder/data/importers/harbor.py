"""Harbor task folders (versions 1.x of task.toml): folders with task.toml and instruction.md, or a folder of such ones.

A policy answers with one bash script, which runs where an agent would work. Then tests/test.sh runs in another sandbox,
into which /app and /workspace, or the artifacts, are copied (data/harbor/in_sandbox.py). Folders that
`nouscoder data export harbor` has written become the problems that they were.

INVARIANT: a folder is imported only after its solution got the reward 1, and an empty script did not, in a sandbox of
this machine. A folder that says it needs what no sandbox has here (an image that is built, the network, several steps,
services, a GPU) is rejected before anything runs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from nouscoder.config import load_config
from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.importers.fields import Reason, Rejected, Row
from nouscoder.data.importers.rows import Format, package_rows
from nouscoder.data.json_records import SourceRow
from nouscoder.data.packages import PackageFiles
from nouscoder.data.problems import ProblemBody, Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CheckerTests, JudgeProgram, Limits, StdinCase
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.json_values import RepeatedKey, json_weight
from nouscoder.verifier.grading.grader import Grader, local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

NATIVE = "tests/problem.json"  # in the folders of `data export harbor`
_MOST_S, _USUAL_S = 300.0, 600.0  # the most that a submission may ask for; Harbor's default
_PLACES = re.compile(r"/(app|workspace)(/(?!\.\.?(/|$))[\w.+-]+)*/?")
_ARTIFACTS = re.compile(r"/(app|workspace|logs/artifacts)(/.*)?")
_IMAGES = re.compile(r"([\w-]+(\.[\w-]+)+(:\d+)?/)?(library/)?(python|debian|ubuntu|bash)(:[\w.-]+)?")
_NETWORK = re.compile(r"(?<![\w./-])(apt-get|apt|apk|curl|wget|uvx|npm|npx|git clone|(uv )?pip3? install)\b")
_TEMPLATE = """{prompt}

Answer with one bash script that does this, in a block that begins with {block}. It runs in the folder WORKDIR. There is
no network.
"""


class _Image(NamedTuple):
    """What a Dockerfile adds to a common image. Files are base64, by their place."""

    workdir: str
    files: dict[str, str]
    env: dict[str, str]


def _unsupported(detail: str) -> Rejected:
    return Rejected(Reason.UNSUPPORTED, detail)


def _config(files: PackageFiles) -> dict[str, Any]:
    try:
        config = tomllib.loads(files.text("task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise Rejected(Reason.MALFORMED, f"task.toml: {error}") from None
    version = str(config.get("schema_version", config.get("version", "1.4")))
    if not version.startswith("1."):
        raise _unsupported(f"task.toml has version {version:.20}; versions 1.x are known")
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    own = _table(verifier, "environment")
    needs = {
        "several steps": config.get("steps"),
        "the commands of verifier.collect": verifier.get("collect"),
        "another user": {str(table.get("user") or "root") for table in (verifier, _table(config, "agent"))}
        - {"root", "0"},
        "docker-compose.yaml": [name for name in files.names if name.endswith(("docker-compose.yaml", "compose.yml"))],
    }
    for table in (environment, own):
        for key in ("docker_image", "mcp_servers", "healthcheck", "gpus", "tpu", "skills_dir", "allowed_hosts"):
            needs[key] = needs.get(key) or table.get(key)
        needs["another system than Linux"] = (
            needs.get("another system than Linux") or str(table.get("os", "linux")).lower() != "linux"
        )
    for what, value in needs.items():
        if value:
            raise _unsupported(f"it needs {what}, which no sandbox has here")
    return config


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise Rejected(Reason.MALFORMED, f"{name} in task.toml is no table")
    return value


def _env(table: dict[str, Any]) -> dict[str, str]:
    env = {str(key): str(value) for key, value in _table(table, "env").items()}
    if outside := next((key for key, value in env.items() if "${" in value), None):
        raise _unsupported(f"the variable {outside:.60} comes from the host of Harbor")
    return env


def _image(files: PackageFiles, folder: str) -> _Image:
    """What the Dockerfile of a folder makes. Raises Rejected for one that must be built."""
    workdir, placed, env = "/app", dict[str, str](), dict[str, str]()
    if f"{folder}/Dockerfile" not in files:
        return _Image(workdir, placed, env)
    text = re.sub(r"\\\n", " ", files.text(f"{folder}/Dockerfile"))
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word.upper():
            case "FROM" if _IMAGES.fullmatch(rest):
                pass
            case "WORKDIR" if _PLACES.fullmatch(rest):
                workdir = rest
            case "ENV" if "=" in rest:
                env |= dict(pair.partition("=")[::2] for pair in shlex.split(rest))
            case "COPY" if not rest.startswith(("--", "[")):
                placed |= _copied(files, folder, workdir, shlex.split(rest))
            case "LABEL" | "EXPOSE" | "CMD" | "MAINTAINER" | "SHELL":
                pass
            case other if not other.startswith("#"):
                raise _unsupported(f"{folder}/Dockerfile must be built, and no image is built here: {line:.80}")
    return _Image(workdir.rstrip("/"), placed, env)


def _copied(files: PackageFiles, folder: str, workdir: str, words: list[str]) -> dict[str, str]:
    *sources, to = words
    target = posixpath.normpath(posixpath.join(workdir, to))
    if not (_PLACES.fullmatch(target) or target.split("/")[1] == "tests"):
        raise _unsupported(f"{folder}/Dockerfile copies to {target:.80}, which no program here may write to")
    placed = {}
    for source in sources:
        path = posixpath.normpath(posixpath.join(folder, source))
        if f"{path}/".partition("/")[0] != folder:
            raise Rejected(Reason.MALFORMED, f"{folder}/Dockerfile copies {source:.80}, which is not in its folder")
        if path in files:
            is_folder = to.endswith(("/", ".")) or len(sources) > 1
            name = posixpath.join(target, posixpath.basename(path)) if is_folder else target
            placed[name] = _packed(files, path)
        elif not (below := files.under(path, "")):
            raise Rejected(Reason.MALFORMED, f"{folder}/Dockerfile copies {source:.80}, which is not there")
        else:
            placed |= {posixpath.join(target, name[len(path) + 1 :]): _packed(files, name) for name in below}
    return placed


def _packed(files: PackageFiles, name: str) -> str:
    return base64.b64encode(files.data(name)).decode()


def _read(name: str, files: PackageFiles) -> ReferencedProblem:
    config = _config(files)
    if "nouscoder" in _table(config, "metadata"):
        return _native(files, config["metadata"]["nouscoder"])
    for needed in ("instruction.md", "tests/test.sh", "solution/solve.sh"):
        if needed not in files:
            raise Rejected(Reason.MISSING_FIELD, f"there is no {needed}")
    verifier, environment = _table(config, "verifier"), _table(config, "environment")
    if found := _NETWORK.search(files.text("tests/test.sh")):
        raise _unsupported(f"tests/test.sh needs the network: it calls {found[0]}")
    image = _image(files, "environment")
    workdir = str(environment.get("workdir") or image.workdir)
    if not _PLACES.fullmatch(workdir):
        raise _unsupported(f"it works in {workdir:.80}; here programs write to /app and /workspace")
    separate = verifier.get("environment_mode", "separate" if "environment" in verifier else "shared") == "separate"
    of_verifier = separate and "tests/Dockerfile" in files
    own = _image(files, "tests") if of_verifier else image
    artifacts = [_artifact(one, workdir) for one in config.get("artifacts", [])]
    paths = [*artifacts, "/logs/artifacts"] if separate else ["/app", "/workspace"]
    folder = {
        "workdir": workdir,
        "environment": image.files,
        "env": image.env | _env(environment) | _env(_table(config, "solution")),
        "paths": paths,
    }
    judged = {
        "workdir": own.workdir if separate else workdir,
        "image": image.files if separate and not of_verifier else {},
        "paths": paths,
        "env": own.env | _env(_table(verifier, "environment") if separate else environment) | _env(verifier),
        "tests": (own.files if of_verifier else {})
        | {f"/{one}": _packed(files, one) for one in files.under("tests", "")},
    }
    answer = _answer(files)
    case = StdinCase(json.dumps(judged, sort_keys=True), answer)
    text = resources.files("nouscoder.data.harbor").joinpath("in_sandbox.py").read_text()
    runner = JudgeProgram(f"{text}\nsys.exit(answered({json.dumps(folder, sort_keys=True)}))\n", "python")
    checker = JudgeProgram(f"{text}\nsys.exit(judged())\n", "python")
    problem = Problem(
        problem_id=name,
        prompt=files.text("instruction.md").strip(),
        prompt_template=_TEMPLATE.replace("WORKDIR", workdir),
        tests=CheckerTests((case,), checker, of_code=True, runner=runner),
        limits=_limits(verifier, environment),
        source="harbor",
        languages=("bash",),
    )
    return ReferencedProblem(problem, (Reference(answer, "bash"),), names_languages=True)


def _artifact(given: Any, workdir: str) -> str:
    if isinstance(given, dict) and not given.keys() - {"source"}:
        given = given.get("source")
    if not isinstance(given, str):
        raise _unsupported(f"an artifact has options: {given!r:.80}")
    path = posixpath.normpath(posixpath.join(workdir, given))
    if ".." in given.split("/") or not _ARTIFACTS.fullmatch(path):
        raise _unsupported(f"the artifact {given:.80} is not in /app, /workspace or /logs/artifacts")
    return path


def _limits(verifier: dict[str, Any], environment: dict[str, Any]) -> Limits:
    seconds, memory_mb = verifier.get("timeout_sec", _USUAL_S), environment.get("memory_mb", 4096)
    for value in (seconds, memory_mb):
        if type(value) not in (int, float) or not (math.isfinite(value) and 0 < value < 2**20):
            raise Rejected(Reason.MALFORMED, f"{value!r:.40} is no limit of time or memory")
    wall_time_s = min(float(seconds), _MOST_S)
    return replace(Limits(), wall_time_s=wall_time_s, cpu_time_s=wall_time_s, memory_bytes=int(memory_mb) << 20)


def _answer(files: PackageFiles) -> str:
    """The oracle's script with the files of solution/, as one script."""
    others = [name for name in files.under("solution", "") if name != "solution/solve.sh"]
    if not others:
        return files.text("solution/solve.sh")
    parts = [
        f"mkdir -p {shlex.quote(posixpath.dirname(f'/{one}'))}\n"
        f"base64 -d > {shlex.quote(f'/{one}')} <<'END'\n{_packed(files, one)}\nEND\n"
        for one in others
    ]
    return f"{''.join(parts)}\n{files.text('solution/solve.sh')}"


def _native(files: PackageFiles, version: Any) -> ReferencedProblem:
    if version != 1:
        raise _unsupported(f"metadata.nouscoder is {version!r:.20}, and this version reads 1")
    try:
        json_weight(text := files.data(NATIVE))
        body = ProblemBody.model_validate_json(text)
    except RepeatedKey as error:
        raise Rejected(Reason.MALFORMED, f"{NATIVE}: {error}") from None
    except ValidationError as error:
        raise Rejected(Reason.MALFORMED, f"{NATIVE}: {error.errors()[0]['msg']}") from None
    found = (Reference(files.text(name)) for name in ("solution/solution.py",) if name in files)
    return ReferencedProblem(body.record(), tuple(found), body.metadata, names_languages=True)


def packages(path: Path, skip: int) -> Iterator[SourceRow]:
    """The folders at a path. Raises ProblemFileError when there is none, and SandboxUnavailable."""
    with asyncio.Runner() as runner, closing(_Proof(runner)) as proof:
        for row in package_rows(path, skip, "task.toml"):
            yield SourceRow(row.number, {**row.value, "proof": proof})


class _Proof:
    """Grades in sandboxes of this machine, which start with the first folder that needs them."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = AsyncExitStack()
        self._grader: Grader | None = None

    def require(self, problem: Problem, answer: str) -> None:
        """Raises Rejected unless the tests accept the answer and refuse an empty one."""
        self._runner.run(self._require(problem, answer))

    async def _require(self, problem: Problem, answer: str) -> None:
        if self._grader is None:
            self._grader = await self._stack.enter_async_context(local_grader(load_config(None).verifier))
        rules = replace(problem.grading_rules(), text_is_code=True)
        for code, wanted in ((answer, True), ("", False)):
            try:
                verdict = await self._grader.grade(replace(rules.submission(problem.tests, code), reveal=True))
            except InvalidSubmission as error:
                raise Rejected(Reason.NOT_VERIFIABLE, f"its solution does not pass its tests here: {error}") from None
            if (verdict.kind is VerdictKind.ACCEPTED) is not wanted:
                what = "its solution does not pass its tests here" if wanted else "an empty answer passes its tests"
                raise Rejected(Reason.NOT_VERIFIABLE, f"{what}: {verdict.kind.value} {verdict.detail:.200}".rstrip())

    def close(self) -> None:
        """Stop the sandboxes."""
        self._runner.run(self._stack.aclose())


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a folder, named by it. Raises Rejected, which names the folder."""
    try:
        item = _read(row["name"], row["files"])
        if item.problem.source == "harbor" and isinstance(item.problem.tests, CheckerTests):
            row["proof"].require(item.problem, item.references[0].code)
        return item
    except FileRefused as error:
        raise Rejected(Reason.MALFORMED, f"{row['name']}: {error}") from None
    except Rejected as error:
        raise Rejected(error.reason, f"{row['name']}: {error}") from None


FORMATS = {"harbor": Format(read, "Harbor task folders: tests/test.sh grades a bash script; needs a sandbox", packages)}
