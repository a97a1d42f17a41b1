"""Packages that this installation lacks, by the extras of the project that bring them.

A command imports what it needs when it is called. `as_missing_extra` makes one sentence of an import that fails; what
would do a part of its work before that import asks `require` first.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from nouscoder.errors import Unusable
from nouscoder.installation import GRADER, has_trainer, how_to_install

# Modules whose distribution has another name, or that come with another distribution.
_DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry-api",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "urllib3": "kubernetes",
    "websocket": "kubernetes",
    "yaml": "pyyaml",
}
# Commands whose packages are in several extras; the others are told the extra of the package.
_OF_COMMANDS = dict.fromkeys(("demo", "train", "prepare-run", "plan", "self-play"), "demo") | {
    "bench": "bench",
    "sft": "demo",
    "reward-model": "demo",
}
# The first of these that has the package is named.
_FOR_PEOPLE = (
    *("verifier", "data", "broker", "generation", "gguf", "hub", "math", "tracing", "cluster", "modal"),
    *("tensorboard", "wandb", "mlflow", "bench"),
)
# What a process that samples from a policy or trains it imports, sooner or later.
MODEL_LIBRARIES = ("torch", "transformers", "safetensors")
_REQUIREMENT = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]")


class ExtraMissing(Unusable):
    """A Python package is not installed. The message names it, and how to install it."""


def extra_of(module: str, command: str = "") -> str:
    """The extra that brings a module for a command; "" when no extra does."""
    root = module.partition(".")[0]
    name = _normal(_DISTRIBUTIONS.get(root, root))
    try:
        of_package = requires("nouscoder" if has_trainer() else GRADER) or ()
        named = [found.groups() for each in of_package if (found := _REQUIREMENT.match(each))]
    except PackageNotFoundError:  # the files were copied, not installed
        return _OF_COMMANDS.get(command, "")
    extras = {extra for distribution, extra in named if _normal(distribution) == name}
    return next((extra for extra in (_OF_COMMANDS.get(command, ""), *_FOR_PEOPLE) if extra in extras), "")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def require(extra: str, *modules: str) -> None:
    """Raises ExtraMissing for the first of the modules that is not installed; `extra` brings it."""
    for module in modules:
        if find_spec(module) is None:
            raise _missing(module, extra)


def as_missing_extra(error: BaseException, command: str = "") -> BaseException:
    """The error of an import as ExtraMissing, if an extra brings what is missing; any other error as it is."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return error
    root = error.name.partition(".")[0]
    if root == "nouscoder" and not has_trainer():
        whole = how_to_install(_OF_COMMANDS.get(command, "demo"))
        return ExtraMissing(f"{GRADER} has the grading service alone; the whole project has this too: {whole}")
    extra = extra_of(root, command)
    return error if not extra or find_spec(root) is not None else _missing(root, extra)


def _missing(module: str, extra: str) -> ExtraMissing:
    return ExtraMissing(f"the Python package {module} is not installed: {how_to_install(extra)}")
