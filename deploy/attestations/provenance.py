"""Where an image comes from: an in-toto statement (v1) with SLSA's provenance (v1) as its predicate.

Sources: https://in-toto.io/Statement/v1, https://slsa.dev/spec/v1.0/provenance. The facts are those that the build
wrote into the image (its labels), and the lock files as they stand in the commit that it names.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from deploy.attestations.oci_archive import Image

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
BILL_OF_MATERIALS = "https://cyclonedx.org/bom"
_BUILD_TYPE = "urn:nouscoder:deploy-images-build:1"  # by deploy/images/build: a Dockerfile, the checkout, its arguments
_REVISION, _BASE = "org.opencontainers.image.revision", "org.opencontainers.image.base.name"
_VERSION = "org.opencontainers.image.version"


class UnknownOrigin(Exception):
    """The image does not say which commit it was built from. The message says why it cannot be attested."""


def statement(name: str, image: Image, predicate_type: str, predicate: dict[str, Any]) -> dict[str, Any]:
    """What is said (`predicate`) of the image with this digest."""
    algorithm, _, digest = image.digest.partition(":")
    subject = {"name": name, "digest": {algorithm: digest}}
    return {"_type": STATEMENT, "subject": [subject], "predicateType": predicate_type, "predicate": predicate}


def provenance(name: str, image: Image, checkout: Path, source: str, builder: str) -> dict[str, Any]:
    """The predicate for an image of this project.

    `source` is the address of the repository and `builder` that of who has built it, as the reader knows them. Raises
    UnknownOrigin.
    """
    short = name.removeprefix("nouscoder-")
    revision = image.labels.get(_REVISION, "unknown")
    if not revision.isalnum() or revision == "unknown":
        raise UnknownOrigin(
            f"{name} was built from {revision!r}: commit all changes, and build it again with deploy/images/build"
        )
    dockerfile = f"deploy/images/{short.replace('vllm', 'generation')}/Dockerfile"
    inputs = [dockerfile, f"requirements/{short}.txt"]
    dependencies = [{"uri": f"git+{source}", "digest": {"gitCommit": revision}}]
    dependencies += [
        {"uri": f"git+{source}#{path}", "digest": {"sha256": _digest(checkout, revision, path)}} for path in inputs
    ]
    return {
        "buildDefinition": {
            "buildType": _BUILD_TYPE,
            "externalParameters": {"dockerfile": dockerfile, "baseImage": image.labels.get(_BASE, "unknown")},
            "internalParameters": {"version": image.labels.get(_VERSION, "unknown")},
            "resolvedDependencies": dependencies,
        },
        "runDetails": {"builder": {"id": builder}, "metadata": {"finishedOn": image.created}},
    }


def _digest(checkout: Path, revision: str, path: str) -> str:
    shown = subprocess.run(["git", "-C", str(checkout), "show", f"{revision}:{path}"], capture_output=True, check=False)
    if shown.returncode:
        raise UnknownOrigin(f"this checkout does not have {path} of commit {revision}: {shown.stderr.decode().strip()}")
    return hashlib.sha256(shown.stdout).hexdigest()
