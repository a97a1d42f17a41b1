"""The bill of materials of an image (CycloneDX 1.6): its Debian packages and its Python packages.

It lists what the image itself says that it holds: dpkg's status and the METADATA of each installed wheel. Two runs over
the same image give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime
from email.parser import BytesParser, Parser
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from deploy.attestations.oci_archive import Image
from packageurl import PackageURL


def bill_of_materials(name: str, image: Image) -> dict[str, Any]:
    """The document for the image `name`."""
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, image.digest))
    bom.metadata.timestamp = datetime.fromisoformat(image.created)
    algorithm, _, digest = image.digest.partition(":")
    if algorithm != "sha256":
        raise ValueError(f"the digest of the image is of the kind {algorithm}, not sha256")
    root = Component(
        name=name,
        version=image.digest,
        type=ComponentType.CONTAINER,
        bom_ref=image.digest,
        purl=PackageURL("oci", None, name, image.digest, {"arch": image.architecture}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    bom.metadata.component = root
    for component in (*_debian_packages(image), *_python_packages(image)):
        bom.components.add(component)
    bom.register_dependency(root, bom.components)
    made: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return made


def _debian_packages(image: Image) -> Iterator[Component]:
    fields = _os_release(image)
    distribution = f"{fields.get('ID', 'debian')}-{fields.get('VERSION_ID', '')}".rstrip("-")
    for paragraph in image.files.get("var/lib/dpkg/status", b"").decode(errors="replace").split("\n\n"):
        package = Parser().parsestr(paragraph, headersonly=True)
        if package["Status"] != "install ok installed":
            continue
        arch = package["Architecture"]
        purl = PackageURL(
            "deb", fields.get("ID", "debian"), package["Package"], package["Version"],
            {"arch": arch, "distro": distribution},
        )  # fmt: skip
        yield Component(name=package["Package"], version=package["Version"], purl=purl, bom_ref=purl.to_string())


def _python_packages(image: Image) -> Iterator[Component]:
    """One for each name and version; an image may have the same package in two folders."""
    found = {}
    for path, content in sorted(image.files.items()):
        if path.endswith(".dist-info/METADATA"):
            package = BytesParser().parsebytes(content, headersonly=True)
            found[package["Name"].lower().replace("_", "-"), package["Version"]] = package
    for (name, version), package in found.items():
        stated = package["License-Expression"] or package["License"] or ""
        one_line = stated.strip() if 0 < len(stated.strip().splitlines()) <= 1 else ""  # some have the whole text
        purl = PackageURL("pypi", None, name, version)
        yield Component(
            name=name,
            version=version,
            purl=purl,
            bom_ref=purl.to_string(),
            licenses=[LicenseFactory().make_from_string(one_line)] if one_line else [],
        )


def _os_release(image: Image) -> dict[str, str]:
    text = image.files.get("usr/lib/os-release") or image.files.get("etc/os-release") or b""
    pairs = (line.split("=", 1) for line in text.decode().splitlines() if "=" in line)
    return {key: value.strip('"') for key, value in pairs}
