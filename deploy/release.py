#!/usr/bin/env python3
"""release.py build | publish VERSION: a release of this tree, as files in dist/VERSION, and its publication.

`build` makes what a release has and publishes nothing: the source distribution and the wheels, the chart, archives of
the images for the platforms that this machine builds, the notes of CHANGELOG.md, and SHA256SUMS. It prints sizes and
times, what still keeps the version from being published, and the commands that publish it. It needs no credentials.

`publish` refuses while anything keeps the version from being published. Else it makes the same files, except images,
and runs the commands: images with docker buildx, chart with helm, package with uv, and last `gh release create`, which
also makes the tag. Each of these programs has the credentials of whoever runs it. After a failure, publish again: what
is published already stays as it is, or is replaced by the same.

`texts index` or `texts clone` writes into messages and documents how the project is installed: from the package index,
which the commit of the first release chooses, or in a clone.

REGISTRY=HOST/PATH names where images and chart go. IMAGES names the images to build
(default: the five of the chart), "none" for none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
HEADING = re.compile(r"^## \[(?P<name>[^]]+)\](?P<date> - \d{4}-\d\d-\d\d)?$", re.MULTILINE)
INSTALLATION = ROOT / "services" / "nouscoder" / "installation.py"
COMMAND = re.compile(r"(pip\sinstall\s+')(?:\.|nouscoder)(?=\[)")  # as documents show it
PART = re.compile(r"(pip\sinstall\s)(?:packages/)?(?=nouscoder-(?:grader|client)\b)")
# What README.md says beside its commands.
SENTENCES = {
    False: "There is no release on the package index yet: these commands work in a clone of this repository.",
    True: "These commands install the newest release. In a clone of this repository, write `.` for `nouscoder`.",
}
TOOLS = ("docker", "helm", "uv", "gh")
PLATFORMS = {"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}  # and the name of its emulator in the kernel
ALL = ("verifier", "broker", "generation", "learner", "sandbox")


class Refused(Exception):
    """The message is one sentence for the maintainer."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides whether a version may be published.

    `changed` are the files that differ from the commit, `tags` maps each tag vX of a version to its commit, `head` is
    the commit of the tree, `pushed` says whether the remote has it, `changelog` is the text of CHANGELOG.md,
    `on_the_index` is what the texts say, `missing` are the programs that are not installed, and `registry` is where
    images and chart go.
    """

    changed: Sequence[str]
    tags: dict[str, str]
    head: str
    pushed: bool
    changelog: str
    on_the_index: bool
    missing: Sequence[str]
    registry: str


def reasons(version: str, facts: Facts) -> list[str]:
    """Why the version cannot be published, one sentence each. Raises Refused for a text that is no version."""
    numbers = parsed(version)
    found = []
    if facts.changed:
        more = f" and {len(facts.changed) - 1} more" if facts.changed[1:] else ""
        found.append(f"{facts.changed[0]}{more} differ from the commit: commit or remove them")
    if not facts.pushed:
        found.append("the commit is on no branch of a remote: push it, so that the tag names what others have")
    if facts.tags.get(f"v{version}", facts.head) != facts.head:
        found.append(f"the tag v{version} exists and names another commit: a published version never changes")
    newer = [tag for tag in facts.tags if tag != f"v{version}" and parsed(tag[1:]) > numbers]
    if newer:
        found.append(f"{newer[0]} is newer: choose a version above all tags")
    headings = {heading["name"]: heading["date"] for heading in HEADING.finditer(facts.changelog)}
    if version not in headings:
        found.append(f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD': name what [Unreleased] has become")
    elif not headings[version]:
        found.append(f"CHANGELOG.md has no date at [{version}]")
    if not facts.on_the_index:
        found.append(
            "messages and documents say that there is no release: .venv/bin/python deploy/release.py texts index"
        )
    if not is_registry(facts.registry):
        found.append("REGISTRY does not say where images and chart go: REGISTRY=HOST/PATH")
    return found + [f"{tool} is not installed" for tool in facts.missing]


def parsed(version: str) -> tuple[int, int, int]:
    """The numbers of X.Y.Z, which Python packages, charts and tags of images can have. Raises Refused."""
    found = VERSION.fullmatch(version)
    if found is None:
        raise Refused(f"{version!r} is not of the form X.Y.Z")
    return int(found[1]), int(found[2]), int(found[3])


def facts_of(root: Path) -> Facts:
    """The facts of a clone. Raises Refused where it is none."""
    if not (root / ".git").exists():
        raise Refused("a release is made in a clone of the repository, not in an archive of it")
    names = output(
        root, "git", "for-each-ref", "--format=%(refname:short) %(objectname) %(*objectname)", "refs/tags/v*"
    )
    tags = {line.split()[0]: line.split()[-1] for line in names.splitlines()}
    docker = [] if _works("docker", "buildx", "version") else ["docker with buildx"]
    return Facts(
        changed=[line[3:] for line in output(root, "git", "status", "--porcelain").splitlines()],
        tags={tag: commit for tag, commit in tags.items() if VERSION.fullmatch(tag[1:])},
        head=output(root, "git", "rev-parse", "HEAD").strip(),
        pushed=bool(output(root, "git", "branch", "--remotes", "--contains", "HEAD").strip()),
        changelog=(root / "CHANGELOG.md").read_text("utf8"),
        on_the_index="\nON_THE_INDEX = True\n" in (root / INSTALLATION.relative_to(ROOT)).read_text("utf8"),
        missing=docker + [tool for tool in TOOLS[1:] if shutil.which(tool) is None],
        registry=registry(),
    )


def notes(version: str, changelog: str, registry: str) -> str:
    """The release notes: how to install this version, and its part of CHANGELOG.md ([Unreleased] where it has none)."""
    names = [heading["name"] for heading in HEADING.finditer(changelog)]
    parts = dict(zip(names, HEADING.split(changelog)[3::3], strict=True))
    return f"""## Install
- `pip install 'nouscoder[demo]=={version}'` to train, `'nouscoder[verifier]=={version}'` to grade,
  `'nouscoder[client]=={version}'` for a trainer that calls a grading service.
- `helm install nouscoder oci://{registry}/charts/nouscoder --version {version}`; the images are
  `{registry}/nouscoder-*:{version}` for amd64 and arm64, and `{version}-cpu` without libraries for GPUs.

{parts.get(version, parts.get("Unreleased", "")).strip()}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that publishes, and its variables besides those of the environment."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.variables), *self.words])


def publication(version: str, head: str, registry: str, folder: Path) -> list[Command]:
    """The commands that publish, in this order. The tag comes last: what it names is complete."""
    as_version = (("NOUSCODER_VERSION", version),)
    build = ("deploy/images/build", "--publish", registry)
    source, names = folder / f"nouscoder-{version}.tar.gz", ("nouscoder", "nouscoder_grader", "nouscoder_client")
    wheels = [folder / f"{name}-{version}-py3-none-any.whl" for name in names]
    chart, sums = folder / f"nouscoder-{version}.tgz", folder / "SHA256SUMS"
    told = ("--target", head, "--title", version, "--notes-file", str(folder / "NOTES.md"))
    return [
        Command((*build, "--accelerator", "cuda", *ALL, "vllm"), as_version),
        Command((*build, "--accelerator", "cpu", "--tag", f"{version}-cpu", *ALL), as_version),
        Command(("helm", "push", str(chart), f"oci://{registry}/charts")),
        Command(("uv", "publish", "--trusted-publishing", "automatic", *map(str, (source, *wheels)))),
        Command(("gh", "release", "create", f"v{version}", *told, *map(str, (source, *wheels, chart, sums)))),
    ]


def build(version: str, folder: Path, images: Sequence[str]) -> None:
    """Make the files of a release in a new folder, and print the size of each and the time of each step."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit_s = output(ROOT, "git", "log", "-1", "--format=%ct").strip()
    variables = {"NOUSCODER_VERSION": version, "SOURCE_DATE_EPOCH": commit_s}
    python = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    step("source distribution and wheel", python, variables)
    for name in ("grader", "client"):
        words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        step(f"wheel of the {name} alone", words, variables, ROOT / "packages" / f"nouscoder-{name}")
    named = [registry()] if is_registry(registry()) else []
    step("chart", [sys.executable, "deploy/package-chart", version, str(folder), *named], variables)
    for machine, emulator in PLATFORMS.items() if images else ():
        if platform.machine() in emulator or Path("/proc/sys/fs/binfmt_misc", emulator).exists():
            words = ["deploy/images/build", "--archives", str(folder), "--platform", f"linux/{machine}", *images]
            step(f"images for {machine}", words, variables)
        else:
            say(f"release: no images for {machine}, which needs the emulator {emulator}; its locked packages:")
            step(f"packages for {machine}", [sys.executable, "deploy/check-arm64"], variables)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf8")
    (folder / "NOTES.md").write_text(notes(version, changelog, registry()), "utf8")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sums = [f"{digest(path)}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), "utf8")
    for path in files:
        say(f"{path.stat().st_size / 1e6:9.2f} MB  {path.name}")


def step(what: str, words: Sequence[str], variables: dict[str, str], where: Path = ROOT) -> None:
    """Run one command, with its output on stderr. Raises Refused when it fails."""
    begin = time.monotonic()
    done = subprocess.run(words, cwd=where, env=os.environ | variables, stdout=sys.stderr, check=False)
    if done.returncode:
        raise Refused(f"{what}: {shlex.join(map(str, words))} exited with {done.returncode}")
    say(f"{time.monotonic() - begin:9.1f} s   {what}")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_texts(root: Path, on_the_index: bool) -> list[Path]:
    """Write the form of the install commands into installation.py and the documents. Returns the changed files."""
    constant = INSTALLATION.relative_to(ROOT)
    listed = output(root, "git", "ls-files", "*.md", "examples/*.py", "helm/*.txt", str(constant))
    changed = []
    for path in (root / name for name in listed.splitlines() if name != "CHANGELOG.md"):
        text = path.read_text("utf8")
        written = COMMAND.sub(rf"\g<1>{'nouscoder' if on_the_index else '.'}", text)
        written = PART.sub(rf"\g<1>{'' if on_the_index else 'packages/'}", written)
        written = written.replace(SENTENCES[not on_the_index], SENTENCES[on_the_index])
        if path == root / constant:
            written = re.sub(r"^ON_THE_INDEX = \w+$", f"ON_THE_INDEX = {on_the_index}", text, flags=re.MULTILINE)
        if written != text:
            path.write_text(written, "utf8")
            changed.append(path)
    return changed


def registry() -> str:
    """Where images and chart are published; a word in capitals where nobody has said it."""
    return os.environ.get("REGISTRY") or "REGISTRY"


def is_registry(text: str) -> bool:
    """Whether it begins with a host, by the rule of image names."""
    host = text.partition("/")[0]
    return host == "localhost" or "." in host or ":" in host


def output(root: Path, *words: str) -> str:
    """The output of a command. Raises Refused when it fails."""
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Refused(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _works(*words: str) -> bool:
    return (
        shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


def say(text: str) -> None:
    """One line of the answer."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def release(version: str, publishing: bool) -> None:
    """Build the release, and publish it if asked. Raises Refused."""
    parsed(version)
    facts = facts_of(ROOT)
    why_not = reasons(version, facts)
    if publishing and why_not:
        raise Refused(f"{version} cannot be published:\n" + "\n".join(f"- {reason}" for reason in why_not))
    folder = ROOT / "dist" / version
    chosen = os.environ.get("IMAGES", "").split() or list(ALL)
    build(version, folder, [] if publishing or chosen == ["none"] else chosen)
    commands = publication(version, facts.head, registry(), folder)
    if publishing:
        for command in commands:
            step(str(command), command.words, dict(command.variables))
        return
    for reason in why_not:
        say(f"not ready to be published: {reason}")
    say("nothing is published; PUBLISH=1 runs these commands:")
    for command in commands:
        say(f"  {command}")


def main(words: Sequence[str]) -> None:
    """The command line."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # uv of this environment
    try:
        match list(words):
            case ["build" | "publish" as what, version]:
                release(version, what == "publish")
            case ["texts", "index" | "clone" as form]:
                for path in write_texts(ROOT, form == "index"):
                    say(str(path.relative_to(ROOT)))
            case _:
                raise Refused("usage: release.py build | publish VERSION, or texts index | clone")
    except Refused as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
