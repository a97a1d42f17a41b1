"""`nouscoder data filter`: applies the steps of a recipe and writes the problems that are left.

Beside OUT.parquet there are OUT.parquet.selection.json (the hashes of recipe, inputs and output, and the counts of
each step), OUT.parquet.dropped.jsonl (the step and the reason of each dropped problem) and OUT.parquet.evidence/
(verdicts of programs and answers of models, which a second run reads in place of asking again).

INVARIANT: each problem of the inputs is in the output or dropped by exactly one step, and the output appears complete
or not at all. The hash of the output depends on the problems and their order alone, not on compression or on a path.

A recipe is the TOML file that names the inputs and the filters of a whole selection, in their order (docs/recipes.md).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from nouscoder.atomic_files import sha256_of, whole_or_gone, write_whole
from nouscoder.data.filters import rules
from nouscoder.data.filters.duplicates import Decontaminate, ExactDuplicates, NearDuplicates
from nouscoder.data.filters.models import Answers, EmbeddingDuplicates, JudgeVotes
from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Sources, Step, StepOutcome
from nouscoder.data.filters.verified import ReferencesPass, WrongSolutionsFail
from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.run import ImportSummary, import_files, source_named
from nouscoder.data.pass_rates import pass_rates_file
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import is_parquet, join, made_by, require_new, store_beside, write_parts
from nouscoder.errors import did_you_mean, plain_fault, why_unreadable
from nouscoder.formats.body import Body
from nouscoder.grade_files.answers import GradingTarget
from nouscoder.input_file import regular
from nouscoder.progress_bar import progress_bar
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore

FILTERS: tuple[type[Step], ...] = (
    *(ExactDuplicates, Decontaminate, NearDuplicates),
    *(rules.NumTests, rules.TestsSize, rules.TestsType, rules.PromptLength, rules.PromptScript),
    *(rules.NoUrls, rules.NoImages, rules.Metadata, rules.Dates),
    *(rules.PassRate, rules.Potential, rules.Hardest, rules.Sample, Answers),
    *(ReferencesPass, WrongSolutionsFail),
    *(JudgeVotes, EmbeddingDuplicates),
)
NAMES = {kind.model_fields["filter"].annotation.__args__[0]: kind for kind in FILTERS}  # type: ignore[union-attr]


_MUCH = 0.2  # of a step's problems


class ImportBody(ImportOptions):
    """How a file is made when it does not exist: as by `nouscoder data import`, with the same options."""

    format: str = Field(description="the data set's layout")
    files: list[str] = Field(min_length=1, description="files, or data sets of a hub; see `source_named`")


class RecipeBody(Body):
    """The fields of the file."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="of the selection")
    inputs: list[str] = Field(min_length=1, description="problem files, in the order of the output")
    steps: list[dict[str, Any]] = Field(min_length=1, description="the filters")
    imports: dict[str, dict[str, Any]] = Field({}, description="how files that do not exist are made")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that was read. `folder` is where its relative paths start."""

    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    imports: Mapping[str, ImportBody]
    folder: Path

    @property
    def sha256(self) -> str:
        """The digest of what it says, so comments and the place of the file do not count."""
        said = [self.name, *self.inputs, *(step.model_dump_json() for step in self.steps)]
        said += [f"{name} {body.model_dump_json(exclude_defaults=True)}" for name, body in self.imports.items()]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    @property
    def files(self) -> list[str]:
        """The files that it names."""
        return list(dict.fromkeys([*self.inputs, *(name for step in self.steps for name in step.files())]))


def read_recipe(path: Path, folder: Path | None = None) -> Recipe:
    """The recipe in a TOML file; its paths start at `folder`, by default its own. Raises CannotFilter."""
    try:
        tree = tomllib.loads(regular(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CannotFilter(f"{path} cannot be read as a recipe: {why_unreadable(error)}") from error
    faults: list[str] = []
    body = _validated(RecipeBody, tree, "", faults)
    steps = [_step(number, given, faults) for number, given in enumerate([] if body is None else body.steps, 1)]
    named = {} if body is None else body.imports
    imports = {name: _validated(ImportBody, given, f"imports.{name}: ", faults) for name, given in named.items()}
    if body is None or faults:
        raise CannotFilter("\n".join(f"{path}: {fault}" for fault in faults))
    known = tuple(step for step in steps if step is not None)
    return Recipe(body.name, tuple(body.inputs), known, imports, (folder or path.parent).absolute())


def import_missing(recipe: Recipe) -> Iterator[ImportSummary]:
    """Make the files that the recipe names, that do not exist and that it says how to import. Raises Unusable."""
    for name in recipe.files:
        body = recipe.imports.get(name)
        if body is None:
            continue
        if (recipe.folder / name).exists():
            _check_made_by(recipe.folder / name, body)
            continue
        options = ImportOptions(**body.model_dump(exclude={"format", "files"}, exclude_defaults=True))
        sources = [source_named(file, recipe.folder) for file in body.files]
        recipe.folder.mkdir(parents=True, exist_ok=True)
        yield import_files(body.format, sources, recipe.folder / name, options=options)


def _check_made_by(path: Path, body: ImportBody) -> None:
    """Raises CannotFilter when the file says that an import with another format or other options made it."""
    made = made_by(path) if is_parquet(path) else None
    if made is None:
        return
    now = {"format": body.format, **body.model_dump(mode="json", exclude={"format", "files"}, exclude_defaults=True)}
    before = {"format": made["format"], **made["options"]}
    for key in sorted({*now, *before}):
        if now.get(key) != before.get(key):
            said = [
                f"with {key} {value!r}" if value is not None else f"without {key}"
                for value in (before.get(key), now.get(key))
            ]
            raise CannotFilter(
                f"{path} was imported {said[0]}, and the recipe imports it {said[1]}: delete it, or change the recipe"
            )


def _step(number: int, given: dict[str, Any], faults: list[str]) -> Step | None:
    name = given.get("filter")
    if name not in NAMES:
        faults.append(f"step {number}: {name!r:.60} is not a filter{did_you_mean(str(name), NAMES)}")
        return None
    step: Step | None = _validated(NAMES[name], given, f"step {number} ({name}): ", faults)
    return step


def _validated(kind: type[Any], given: Any, place: str, faults: list[str]) -> Any:
    """The record, or None after adding its faults."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            key = ".".join(str(part) for part in fault["loc"])
            if fault["type"] == "extra_forbidden":
                faults.append(f"{place}unknown key {key}{did_you_mean(key, kind.model_fields)}")
            elif fault["type"] == "missing":
                faults.append(f"{place}{key} is missing")
            else:
                wrong = plain_fault(fault["msg"])
                faults.append(f"{place}{key}: {wrong}" if key else f"{place}{wrong}")
        return None


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step did. `dropped` counts the problems by kind of reason; `table` is the step's own table."""

    filter: str
    settings: dict[str, Any]
    num_in: int
    num_out: int
    dropped: dict[str, int]
    table: dict[str, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The result, as it is written beside the output. `files`: the hashes of all files that the recipe names."""

    name: str
    recipe_sha256: str
    files: dict[str, str]
    steps: list[StepCounts]
    problems: int
    tests: int
    sha256: str
    out: str

    def text(self) -> str:
        """A table for people."""
        lines = [f"{self.name} (recipe {self.recipe_sha256[:12]}):", f"{'':<30}{'in':>10}{'out':>10}"]
        for step in self.steps:
            lines.append(f"{step.filter:<30}{step.num_in:>10}{step.num_out:>10}")
            lines += [f"  {kind:<28}{'':>10}{-count:>10}" for kind, count in step.dropped.items()]
            if step.num_in - step.num_out > _MUCH * step.num_in:
                lines.append(f"  more than {_MUCH:.0%} are dropped: {self.out}.dropped.jsonl says why")
            lines += [f"  | {kind:<26}{count:>10}" for kind, count in step.table.items()]
        lines.append(f"{self.out}: {self.problems} problems, {self.tests} tests, sha256 {self.sha256}")
        return "\n".join(lines)


def select(recipe: Recipe, out: Path, tests: str = "", grading: GradingTarget | None = None) -> Selection:
    """Apply the steps and write the file `out`. `tests` is the place of its test store; empty: beside it.

    The files that the recipe names must exist (`import_missing`). Raises CannotFilter and other Unusable.
    """
    require_new(out, CannotFilter)
    how = dict.fromkeys(recipe.inputs, ": make it with `nouscoder data import`")
    problems = recipe.folder / recipe.inputs[0]
    for step in recipe.steps:
        how |= {name: step.how_to_get(recipe.folder / name, problems) for name in step.files() if name not in how}
    # Pass rates may be the folder of an evaluation.
    paths = {name: recipe.folder / name for name in recipe.files}
    missing = [name for name, path in paths.items() if not path.exists() or (name in recipe.inputs and path.is_dir())]
    if missing:
        raise CannotFilter("\n".join(f"there is no file {recipe.folder / name}{how[name]}" for name in missing))
    staging = out.with_name(f"{out.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        sources = Sources([recipe.folder / name for name in recipe.inputs], staging / "inputs")
        return _Selecting(recipe, sources, out, tests, grading or GradingTarget()).run(staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@dataclass(slots=True)
class _Selecting:
    _recipe: Recipe
    _sources: Sources
    _out: Path
    _tests: str
    _grading: GradingTarget
    _counts: list[StepCounts] = field(default_factory=list)
    _dropped: list[dict[str, str]] = field(default_factory=list)
    _notes: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self, staging: Path) -> Selection:
        kept = self._sources.candidates()
        with progress_bar("filtering", len(self._recipe.steps)) as advance:
            for number, step in enumerate(self._recipe.steps, 1):
                kept = self._apply(number, step, kept)
                advance(1)
        dropped = "".join(json.dumps(one) + "\n" for one in self._dropped)
        if not kept:
            write_whole(self._beside("dropped.jsonl"), dropped.encode())
            steps = ", ".join(f"{step.filter} {step.num_in} -> {step.num_out}" for step in self._counts)
            reasons = f"{self._out}.dropped.jsonl has the reason of each, such as: {self._dropped[-1]['reason']}"
            raise CannotFilter(f"no problem is left: {steps}; {reasons}")
        made = [self._out, store_beside(self._out), self._beside("dropped.jsonl"), self._beside("selection.json")]
        with whole_or_gone(*made):
            write_whole(made[2], dropped.encode())
            return self._finish(kept, staging)

    def _finish(self, kept: Sequence[Candidate], staging: Path) -> Selection:
        sha256, parts = self._written(kept, staging)
        selection = Selection(
            name=self._recipe.name,
            recipe_sha256=self._recipe.sha256,
            files={name: sha256_of(pass_rates_file(self._recipe.folder / name)) for name in self._recipe.files},
            steps=self._counts,
            problems=len(kept),
            tests=sum(one.record.stored.num_tests for one in kept),
            sha256=sha256,
            out=str(self._out),
        )
        write_whole(self._beside("selection.json"), (json.dumps(asdict(selection), indent=1) + "\n").encode())
        join(parts, self._out, self._tests)
        open_index_of(self._out, tests=self._tests).close()
        return selection

    def _apply(self, number: int, step: Step, candidates: list[Candidate]) -> list[Candidate]:
        evidence = self._out.with_name(f"{self._out.name}.evidence") / f"{step.filter}.jsonl"
        context = Context(self._recipe.folder, evidence, self._grading, self._sources.references)
        outcome: StepOutcome = step.apply(candidates, context)
        kept = [one for one in candidates if one.problem_id not in outcome.dropped]
        for one in candidates:
            if reason := outcome.dropped.get(one.problem_id):
                name = f"{number} {step.filter}"
                self._dropped.append({"problem_id": one.problem_id, "step": name, "reason": reason})
        for problem_id, facts in outcome.notes.items():
            self._notes.setdefault(problem_id, {}).update(facts)
        kinds = Counter(reason.partition(":")[0] for reason in outcome.dropped.values())
        settings = step.model_dump(exclude={"filter"})
        self._counts.append(StepCounts(step.filter, settings, len(candidates), len(kept), dict(kinds), outcome.table))
        return kept

    def _written(self, kept: Sequence[Candidate], staging: Path) -> tuple[str, list[Path]]:
        """Copy the tests, then write the rows to files in `staging`. Returns the problems' hash and the files."""
        store = TestStore(open_blobs(self._tests or str(store_beside(self._out)), bulk=True))
        copied, digest = set[str](), hashlib.sha256()

        def rows() -> Iterator[dict[str, Any]]:
            for one, row in self._sources.rows(kept):
                if row.stored.digest not in copied:
                    store.copy(row.stored.digest, one.store)
                    copied.add(row.stored.digest)
                metadata = json.dumps({**one.metadata, **self._notes.get(one.problem_id, {})})
                values = {**row.values, "metadata": metadata}
                hashed = {name: value for name, value in values.items() if name != "file_bytes"}
                digest.update(json.dumps(hashed, sort_keys=True).encode() + b"\n")
                yield values

        parts = write_parts(staging, rows(), self._tests)
        store.sync()
        return digest.hexdigest(), parts

    def _beside(self, ending: str) -> Path:
        return self._out.with_name(f"{self._out.name}.{ending}")
