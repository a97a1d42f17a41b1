"""A registry of OCI on this machine, and images in it: an archive is pushed as a builder does it, and pulled again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

PROJECT = Path(__file__).parents[1]
_LISTENING = re.compile(r"listening on (127\.0\.0\.1:\d+)")
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A registry that keeps its files in the folder. Yields its host and port. Builds the program if it is missing."""
    built = subprocess.run([PROJECT / "deploy" / "build-registry"], check=True, capture_output=True, text=True)
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": "127.0.0.1:0", "secret": "only for this test"},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf8")  # JSON is YAML
    command = [built.stdout.strip(), "serve", str(folder / "config.json")]
    log, variables = folder / "registry.log", os.environ | {"OTEL_TRACES_EXPORTER": "none"}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=variables) as process:
        try:
            yield _address(process, log)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := _LISTENING.search(log.read_text("utf8")):
            return found[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError(f"the registry ended: {log.read_text('utf8')}")


def push(host: str, archive: Path, name: str, tag: str) -> str:
    """Push an OCI archive with one image. Returns the digest of its manifest."""
    with tarfile.open(archive) as tar, httpx.Client(base_url=f"http://{host}/v2/{name}", timeout=300) as client:

        def blob(digest: str) -> bytes:
            file = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert file is not None
            return file.read()

        index = tar.extractfile("index.json")
        assert index is not None
        (described,) = json.load(index)["manifests"]
        manifest = blob(described["digest"])
        for part in (json.loads(manifest)["config"], *json.loads(manifest)["layers"]):
            begun = client.post("/blobs/uploads/").raise_for_status()
            upload = httpx.URL(begun.headers["location"]).copy_add_param("digest", part["digest"])
            client.put(upload, content=blob(part["digest"])).raise_for_status()
        put = client.put(f"/manifests/{tag}", content=manifest, headers={"content-type": described["mediaType"]})
        return str(put.raise_for_status().headers["docker-content-digest"])


def pull(host: str, name: str, tag: str) -> tuple[str, dict[str, Any], int]:
    """Pull an image and check each digest. Returns the manifest's digest, the configuration and the layers' bytes."""
    with httpx.Client(base_url=f"http://{host}/v2/{name}", timeout=300) as client:
        got = client.get(f"/manifests/{tag}", headers={"accept": _MANIFEST}).raise_for_status()
        manifest = got.json()

        def blob(part: dict[str, Any]) -> bytes:
            content = client.get(f"/blobs/{part['digest']}", follow_redirects=True).raise_for_status().content
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == part["digest"]
            return content

        num_bytes = sum(len(blob(layer)) for layer in manifest["layers"])
        digest = f"sha256:{hashlib.sha256(got.content).hexdigest()}"
        return digest, json.loads(blob(manifest["config"])), num_bytes
