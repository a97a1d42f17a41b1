"""The recipes of CONTRIBUTING.md, applied to a copy of the tree: what they say to write passes lint, types and tests.

The texts are the code blocks of the document. Only the places where they go are written here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
SERVICES = "services/nouscoder"


class Copy:
    """A copy of the files that git tracks. Every change names the text beside it, which must be there once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in listed.stdout.split("\0"):
            source, to = ROOT / name, root / name
            if name and source.is_file():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, to)
        (root / ".venv").symlink_to(ROOT / ".venv")

    def write(self, path: str, text: str) -> None:
        assert not (self.root / path).exists()
        (self.root / path).write_text(text, encoding="utf8")

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text(encoding="utf8")
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.root / path).write_text(text.replace(old, new), encoding="utf8")

    def before(self, path: str, anchor: str, text: str) -> None:
        self.replace(path, anchor, text + anchor)

    def after(self, path: str, anchor: str, text: str) -> None:
        self.replace(path, anchor, anchor + text)

    def run(self, *command: str | Path) -> None:
        """Run a command in the copy, whose code is imported. Fails with its output."""
        path = os.pathsep.join(str(self.root / name) for name in ("services", "."))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-2000:]}"

    def tests(self, *arguments: str) -> None:
        self.run(BIN / "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def blocks(heading: str, document: str = "CONTRIBUTING.md") -> list[str]:
    """The code blocks below a heading of a document, in their order, without the indentation of the list."""
    section = (ROOT / document).read_text(encoding="utf8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^( *)```\w+\n(.*?)^\1```$", section, flags=re.M | re.S)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n" for indent, text in found]


def objective(copy: Copy) -> None:
    module, gain = blocks("How to add an objective")
    registry = f"{SERVICES}/objectives/registry.py"
    copy.write(f"{SERVICES}/objectives/mine.py", module)
    copy.before(registry, "from nouscoder.objectives.ppo import", "from nouscoder.objectives.mine import Mine\n")
    copy.replace(registry, "| EntryPointObjective,", "| Mine | EntryPointObjective,")
    tests = "tests/domain/test_objectives.py"
    copy.before(tests, "from nouscoder.objectives.ppo import", "from nouscoder.objectives.mine import Mine\n")
    copy.before(tests, "    if isinstance(objective, Distillation):\n", gain)


def comparator(copy: Copy) -> None:
    branch, program = blocks("How to add a comparator")
    copy.after(
        f"{SERVICES}/domain/submission.py",
        '    LCB = "lcb"  # lines, and lines of numbers as LiveCodeBench\'s grader compares them\n',
        '    FIRST_LINE = "first_line"\n',
    )
    for path in ("formats/body.py", "data/importers/options.py"):
        copy.after(f"{SERVICES}/{path}", '"kattis", "lcb"', ', "first_line"')
    copy.after(f"{SERVICES}/client/records.py", '"exact", "lcb"', ', "first_line"')
    copy.after(
        "proto/nouscoder/v1/verdict.proto",
        "  COMPARATOR_KIND_ENTRY_POINT = 7;\n",
        "  // Only the first line counts.\n  COMPARATOR_KIND_FIRST_LINE = 8;\n",
    )
    copy.before(
        f"{SERVICES}/verifier/judges/comparators.py", "    return _same_tokens(wanted, actual, comparator)\n", branch
    )
    copy.before(
        "tests/domain/test_comparators.py",
        '        (EXACT, "1\\n", b"1\\n", True),\n',
        '        (Comparator(ComparatorKind.FIRST_LINE), "a\\nb", b"a\\nc", True),\n'
        '        (Comparator(ComparatorKind.FIRST_LINE), "a\\nb", b"b\\nb", False),\n',
    )
    comparing = copy.root / "tests/e2e/semantics/comparing.toml"
    comparing.write_text(f"{comparing.read_text(encoding='utf8')}\n{program}", encoding="utf8")
    copy.run("deploy/proto-stubs", "write")


def language(copy: Copy) -> None:
    table, echo, not_compiled = blocks("How to add a language")
    languages = copy.root / SERVICES / "domain/languages.toml"
    languages.write_text(f"{languages.read_text(encoding='utf8')}\n{table}", encoding="utf8")
    tests = "tests/services/test_harness_languages.py"
    copy.after(tests, "# prints its input doubled, then its arguments\n", echo)
    copy.after(tests, "NOT_COMPILED = [  # and a part of the message\n", not_compiled)


def importer(copy: Copy) -> None:
    module, row = blocks("How to add an importer")
    copy.write(f"{SERVICES}/data/importers/mine.py", module)
    last = '{"input": "2 + 2?", "target": "4"}, StdinTests((StdinCase("", "4"),)), ()),\n'
    copy.after("tests/services/test_data_import.py", last, row)


def environment(copy: Copy) -> None:
    section, branch, test = blocks("How to add an environment")
    (written,) = [text for text in blocks("A class of your own", "docs/environments.md") if "class " in text]
    generation = f"{SERVICES}/config/generation.py"
    copy.before(generation, "class EntryPointSection(ToolsSection):", f"{section}\n\n")
    copy.before(generation, "| EntryPointSection,", "| SecondThoughtSection ")
    module = f'"""The policy looks at its own answer once more."""\n\nfrom __future__ import annotations\n\n{written}'
    module = module.replace(
        "from nouscoder.config import EntryPointSection", "from nouscoder.config.generation import SecondThoughtSection"
    ).replace("EntryPointSection,", "SecondThoughtSection,")
    module = module.replace('str(settings.options["question"])', "settings.question")
    signature = "    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:\n"
    module = module.replace(signature, f'{signature}        """Two turns at most."""\n')
    copy.write(f"{SERVICES}/generation/environments/second_thought.py", module)
    chooser = f"{SERVICES}/generation/environments/__init__.py"
    copy.before(
        chooser,
        "from nouscoder.generation.environments.tools import",
        "from nouscoder.generation.environments.second_thought import SecondThought\n",
    )
    copy.before(chooser, "ToolsSection\nfrom", "SecondThoughtSection, ")
    copy.before(chooser, "    return Feedback(tokenizer, settings, tools, max_tokens_total)\n", branch)
    tests = copy.root / "tests/services/test_generation_environments.py"
    text = tests.read_text(encoding="utf8").replace(
        "from nouscoder.config import EnvironmentSection, load_config\n",
        "from typing import cast\n\nfrom nouscoder.config import EnvironmentSection, load_config\n"
        "from nouscoder.config.generation import SecondThoughtSection\n"
        "from nouscoder.generation.environments.second_thought import SecondThought\n"
        "from nouscoder.generation.environments.tools import Tools, ToolVerifier\n",
    )
    tests.write_text(f"{text}\n\n{test}", encoding="utf8")


Recipe = Callable[[Copy], None]
RECIPES: dict[Recipe, tuple[str, ...]] = {
    objective: ("tests/domain/test_objectives.py", "-k", "mine or registry or edge and dapo"),
    comparator: ("tests/domain/test_comparators.py", "tests/domain/test_wire_pairs.py"),
    language: (
        *("tests/domain/test_languages_table.py", "tests/domain/test_prompt_languages.py"),
        *("tests/services/test_harness_languages.py", "-k", "table or prompt or template or statement or awk or every"),
    ),
    importer: ("tests/services/test_data_import.py", "-k", "mine"),
    environment: ("tests/services/test_generation_environments.py", "-k", "second_thought"),
}


def lint(copy: Copy) -> None:
    """As `make format`, then as the part of `make check` that takes seconds."""
    copy.run(BIN / "ruff", "check", "--fix-only", "--quiet", ".")
    copy.run(BIN / "ruff", "format", "--quiet", ".")
    copy.run(BIN / "ruff", "check", "--no-cache", ".")
    copy.run(BIN / "python", "deploy/generated", "write")
    copy.run(BIN / "python", "deploy/generated", "check")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe.__name__))
def test_the_recipe_applied_to_a_copy_passes_lint_and_its_tests(recipe: Recipe, tmp_path: Path) -> None:
    copy = Copy(tmp_path / "tree")
    recipe(copy)
    lint(copy)
    copy.tests(*RECIPES[recipe])


@pytest.mark.parametrize(
    ("recipe", "by_hand", "row", "document"),
    [(objective, 3, "| `mine` |", "docs/recipes.md"), (language, 2, "| `awk` | gawk, mawk |", "docs/verdicts.md")],
    ids=["objective", "language"],
)
def test_a_recipe_touches_few_files_by_hand(
    tmp_path: Path, recipe: Recipe, by_hand: int, row: str, document: str
) -> None:
    copy = Copy(tmp_path / "tree")
    before = {path: path.read_bytes() for path in copy.root.rglob("*") if path.is_file() and ".venv" not in path.parts}
    recipe(copy)
    changed = [path for path in copy.root.rglob("*") if path.is_file() and ".venv" not in path.parts]
    assert sum(before.get(path) != path.read_bytes() for path in changed) == by_hand
    lint(copy)
    assert row in (copy.root / document).read_text(encoding="utf8")


@pytest.mark.long
def test_all_recipes_together_pass_the_type_checker_and_the_import_contracts(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "tree")
    for recipe in RECIPES:
        recipe(copy)
    lint(copy)
    copy.run(BIN / "mypy", "--cache-dir", str(tmp_path / "types"))
    copy.run(BIN / "lint-imports", "--no-cache")
