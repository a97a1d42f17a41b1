"""Bills of materials and provenance of images: from a small OCI archive to signed statements, and their check."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import importlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cyclonedx.schema._res as cyclonedx_schemas
import jsonschema_rs
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

PROJECT = Path(__file__).parents[2]
HEAD = subprocess.run(["git", "-C", str(PROJECT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
DPKG = (
    "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\n\n"
    "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
)
SITE = "opt/nouscoder/lib/python3.11/site-packages"
PACKAGES = {
    "var/lib/dpkg/status": DPKG,
    "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
    f"{SITE}/Redis_Lite-1.0.dist-info/METADATA": "Name: Redis_Lite\nVersion: 1.0\nLicense-Expression: MIT\n\ntext",
    f"{SITE}/old-1.dist-info/METADATA": "Name: old\nVersion: 1\n",
    f"{SITE}/other-2.dist-info/METADATA": "Name: other\nVersion: 2\nLicense: a\n b\n",
    f"{SITE}/other/__init__.py": "",
}
LATER = {
    f"{SITE}/.wh.old-1.dist-info": "",  # hides a folder of the layer below
    f"{SITE}/new-3.dist-info/METADATA": "Name: new\nVersion: 3\n",
}


def tarred(files: Mapping[str, bytes | str], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def oci_archive(path: Path, revision: str = HEAD) -> str:
    """Writes an archive of two layers; returns the digest of its manifest."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    layers = [blob(tarred(PACKAGES, "w:gz")), blob(tarred(LATER, "w:gz"))]
    labels = {"org.opencontainers.image.revision": revision, "org.opencontainers.image.base.name": "python:3.11-slim"}
    config = {"created": "2026-11-23T10:00:00.123456789Z", "architecture": "amd64", "config": {"Labels": labels}}
    manifest = blob(json.dumps({"config": blob(json.dumps(config).encode()), "layers": layers}).encode())
    path.write_bytes(tarred(blobs | {"index.json": json.dumps({"manifests": [manifest]})}))
    return str(manifest["digest"])


def key_files(folder: Path, private: Any) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    own, public = folder / "key.pem", folder / "public.pem"
    own.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return own, public


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    """The folder `deploy` is no part of the installed project."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT))
        yield


@dataclass(frozen=True)
class Done:
    stdout: str
    error: str


def run(*arguments: str | Path) -> Done:
    """The command, in this process. `error` is what it ends with."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            importlib.import_module("deploy.attestations.__main__").main([str(argument) for argument in arguments])
        except SystemExit as end:
            return Done(printed.getvalue(), str(end.code))
    return Done(printed.getvalue(), "")


def make(key: Path, out: Path, archive: Path) -> Done:
    origin = ("--source", "https://example.org/nouscoder", "--builder", "https://example.org/ci")
    return run("make", "--key", key, "--out", out, *origin, f"nouscoder-verifier={archive}")


@pytest.fixture(scope="module")
def made(importable: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """The folder of the files, the digest of the image, and the public key."""
    folder = tmp_path_factory.mktemp("attestations")
    digest = oci_archive(folder / "image.tar")
    own, public = key_files(folder, ec.generate_private_key(ec.SECP256R1()))
    done = make(own, folder / "out", folder / "image.tar")
    assert not done.error
    assert done.stdout == f"nouscoder-verifier {digest}: 4 packages\n"
    return folder / "out", digest, public


def test_the_bill_lists_the_packages_of_the_image_and_conforms_to_cyclonedx(made: tuple[Path, str, Path]) -> None:
    out, digest, _ = made
    bom = json.loads((out / "nouscoder-verifier.cdx.json").read_text())
    assert sorted(component["purl"] for component in bom["components"]) == [
        "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12",
        "pkg:pypi/new@3",
        "pkg:pypi/other@2",
        "pkg:pypi/redis-lite@1.0",
    ]
    assert bom["metadata"]["component"]["version"] == digest
    folder = Path(str(cyclonedx_schemas.__file__)).parent
    schema = json.loads((folder / "bom-1.6.SNAPSHOT.schema.json").read_text())
    registry = jsonschema_rs.Registry(
        [
            (f"http://cyclonedx.org/schema/{file.name}", json.loads(file.read_text()))
            for file in folder.glob("*.schema.json")
        ]
    )
    validator = jsonschema_rs.validator_for(schema, registry=registry)
    assert not [str(error) for error in validator.iter_errors(bom)]
    wrong = copy.deepcopy(bom)
    wrong["components"][0]["type"] = "nonsense"
    assert not validator.is_valid(wrong)


def test_the_provenance_names_the_commit_and_the_digests_of_its_inputs(made: tuple[Path, str, Path]) -> None:
    out, digest, _ = made
    envelope = json.loads((out / "nouscoder-verifier.provenance.dsse.json").read_text())
    said = json.loads(base64.b64decode(envelope["payload"]))
    assert (said["_type"], said["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert said["subject"] == [{"name": "nouscoder-verifier", "digest": {"sha256": digest.removeprefix("sha256:")}}]
    commit, dockerfile, lock = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["digest"] == {"gitCommit": HEAD}
    shown = subprocess.run(
        ["git", "-C", str(PROJECT), "show", f"{HEAD}:requirements/verifier.txt"], capture_output=True, check=True
    )
    assert lock["digest"] == {"sha256": hashlib.sha256(shown.stdout).hexdigest()}
    assert dockerfile["uri"].endswith("#deploy/images/verifier/Dockerfile")


def test_check_believes_only_the_key_and_the_image(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    out, digest, public = made
    files = [out / "nouscoder-verifier.cdx.dsse.json", out / "nouscoder-verifier.provenance.dsse.json"]
    good = run("check", "--key", public, "--digest", digest, *files)
    assert not good.error
    assert good.stdout.count("nouscoder-verifier\n") == 2

    other = run("check", "--key", public, "--digest", "sha256:" + "0" * 64, files[0])
    assert other.error.startswith("attestations: it is about sha256:")

    _, stranger = key_files(tmp_path, ed25519.Ed25519PrivateKey.generate())
    assert "has not signed this" in run("check", "--key", stranger, "--digest", digest, files[0]).error

    envelope = json.loads(files[1].read_text())
    changed = base64.b64decode(envelope["payload"]).replace(HEAD.encode(), b"0" * len(HEAD))
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(envelope | {"payload": base64.b64encode(changed).decode()}))
    assert "has not signed this" in run("check", "--key", public, "--digest", digest, forged).error
    forged.write_text("[]")
    assert "not a signed statement" in run("check", "--key", public, "--digest", digest, forged).error
    assert "holds no public key" in run("check", "--key", forged, "--digest", digest, files[0]).error


@pytest.mark.parametrize("revision", [f"{HEAD}-dirty", "unknown", "0" * 40])
def test_an_image_of_an_unknown_commit_is_refused(tmp_path: Path, revision: str) -> None:
    oci_archive(tmp_path / "image.tar", revision)
    own, _ = key_files(tmp_path, ed25519.Ed25519PrivateKey.generate())
    done = make(own, tmp_path / "out", tmp_path / "image.tar")
    assert done.error.startswith("attestations: ")
    assert not list((tmp_path / "out").iterdir())


def test_the_command_ends_with_one_sentence_and_no_trace(tmp_path: Path) -> None:
    words = ["check", "--key", "none.pem", "--digest", "sha256:0", "none.json"]
    command = [sys.executable, "-m", "deploy.attestations", *words]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "attestations: [Errno 2] No such file or directory: 'none.json'\n"


def test_what_is_no_archive_or_no_key_gets_one_sentence(tmp_path: Path) -> None:
    own, public = key_files(tmp_path, ed25519.Ed25519PrivateKey.generate())
    (tmp_path / "text").write_text("no archive")
    done = make(own, tmp_path / "out", tmp_path / "text")
    assert "is not an OCI archive of one image" in done.error
    assert len(done.error.splitlines()) == 1
    oci_archive(tmp_path / "image.tar")
    assert "holds no private key" in make(public, tmp_path / "out", tmp_path / "image.tar").error


def test_an_archive_whose_content_was_changed_is_refused(tmp_path: Path) -> None:
    oci_archive(tmp_path / "image.tar")
    own, _ = key_files(tmp_path, ed25519.Ed25519PrivateKey.generate())
    changed = (tmp_path / "image.tar").read_bytes().replace(b"python:3.11-slim", b"python:3.12-slim")
    (tmp_path / "image.tar").write_bytes(changed)
    assert "has another digest" in make(own, tmp_path / "out", tmp_path / "image.tar").error
    assert not list((tmp_path / "out").iterdir())
