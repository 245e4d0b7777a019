"""Prints the installed packages as CycloneDX: `python scripts/sbom.py IMAGE [LOCK]`.

Runs at the end of an image's build with the libraries of locks/sbom.txt in its own folder, which
are left out. The same packages and SOURCE_DATE_EPOCH give the same bytes.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def bom_of(image: str, found: Iterable[Distribution], hashes: Mapping[str, list[str]]) -> str:
    """Returns the document. `hashes`: SHA-256 of the allowed files by name==version."""
    components = []
    for one in found:
        name, version = normal(one.name), one.version
        licence = str(one.metadata.json.get("license_expression", ""))
        components.append(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                bom_ref=f"{name}=={version}",
                purl=PackageURL("pypi", None, name, version),
                licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
                hashes=[
                    HashType(alg=HashAlgorithm.SHA_256, content=value)
                    for value in hashes.get(f"{name}=={version}", [])
                ],
            )
        )
    refs = sorted(str(component.bom_ref.value) for component in components)
    serial = uuid5(NAMESPACE_URL, " ".join([image, *refs]))
    bom = Bom(components=components, serial_number=serial)
    bom.metadata.component = Component(name=image, type=ComponentType.CONTAINER, bom_ref=image)
    made_at = int(os.environ.get("SOURCE_DATE_EPOCH", 0))
    bom.metadata.timestamp = datetime.fromtimestamp(made_at, UTC)
    bom.register_dependency(bom.metadata.component, components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def hashes_in(lock: str) -> dict[str, list[str]]:
    """Returns the SHA-256 of each file that the lock allows, by name==version."""
    found: dict[str, list[str]] = {}
    for line in lock.splitlines():
        if pin := re.match(r"([\w.-]+)==([^\s;\\]+)", line):
            current = found.setdefault(f"{normal(pin[1])}=={pin[2]}", [])
        elif value := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            current.append(value[1])
    return found


def normal(name: str) -> str:
    """Returns a package's name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> list[Distribution]:
    """Returns the installed packages, each once, except those in this file's folder."""
    beside = str(Path(__file__).resolve().parent)
    places = [place for place in sys.path if place and str(Path(place).resolve()) != beside]
    found: dict[str, Distribution] = {}
    for one in distributions(path=places):
        found.setdefault(normal(one.name), one)
    return list(found.values())


if __name__ == "__main__":
    image, *locks = sys.argv[1:]
    lock = "".join(Path(path).read_text() for path in locks)
    print(bom_of(image, installed(), hashes_in(lock)))
