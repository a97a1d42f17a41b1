"""Signed bills of materials and provenance of images.

    python -m deploy.attestations make --key KEY.pem --out FOLDER NAME=ARCHIVE...
    python -m deploy.attestations check --key PUBLIC.pem --digest sha256:... FILE...

ARCHIVE is an OCI archive of the image (skopeo, buildah, `docker buildx --output type=oci`). For each image `make`
writes NAME.cdx.json (the bill of materials), and as signed statements NAME.cdx.dsse.json and NAME.provenance.dsse.json.
`check` says what a file states of the image with this digest, or why it cannot be believed. Exit code 1: it cannot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.attestations.bill_of_materials import bill_of_materials
from deploy.attestations.oci_archive import UnreadableArchive, read_archive
from deploy.attestations.provenance import BILL_OF_MATERIALS, PROVENANCE, UnknownOrigin, provenance, statement
from deploy.attestations.signing import NotVerified, UnusableKey, sign, verified

PROJECT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the two commands, by default that of the command line. Raises SystemExit with what is wrong."""
    arguments = _parser().parse_args(words)
    try:
        _make(arguments) if arguments.command == "make" else _check(arguments)
    except (UnreadableArchive, UnknownOrigin, UnusableKey, NotVerified, OSError) as error:
        sys.exit(f"attestations: {error}")


def _make(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, archive in arguments.images:
        image = read_archive(archive)
        bom = bill_of_materials(name, image)
        origin = provenance(name, image, PROJECT, arguments.source, arguments.builder)
        _write(arguments.out / f"{name}.cdx.json", bom)
        for kind, what, said in (("cdx", BILL_OF_MATERIALS, bom), ("provenance", PROVENANCE, origin)):
            signed = sign(statement(name, image, what, said), arguments.key)
            _write(arguments.out / f"{name}.{kind}.dsse.json", signed)
        _say(f"{name} {image.digest}: {len(bom['components'])} packages")


def _check(arguments: argparse.Namespace) -> None:
    for file in arguments.files:
        said = verified(file.read_bytes(), arguments.key, arguments.digest)
        _say(f"{file}: {said['predicateType']} of {said['subject'][0]['name']}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _image(text: str) -> tuple[str, Path]:
    name, _, archive = text.partition("=")
    if not name.startswith("nouscoder-") or not archive:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ARCHIVE with a NAME such as nouscoder-verifier")
    return name, Path(archive)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.attestations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write and sign")
    make.add_argument("--key", type=Path, required=True, help="private key, PEM")
    make.add_argument("--out", type=Path, required=True, help="folder of the files")
    make.add_argument("--source", required=True, help="address of the repository")
    make.add_argument("--builder", required=True, help="URI of who builds, such as the CI job")
    make.add_argument("images", nargs="+", type=_image, metavar="NAME=ARCHIVE")
    check = commands.add_parser("check", help="verify")
    check.add_argument("--key", type=Path, required=True, help="public key, PEM")
    check.add_argument("--digest", required=True, help="digest of the image, as the registry shows it")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
