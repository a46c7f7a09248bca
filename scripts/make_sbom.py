"""Write a bill of materials (CycloneDX 1.6, JSON) beside the wheel, for each lock of docker/.

    python scripts/make_sbom.py dist docker/requirements-*.txt

It contains what the locks say: versions, the SHA-256 of every file that may be installed, and the
packages' dependencies. The same wheel and lock give the same bytes.
"""

import hashlib
import json
import re
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = "spile"
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_VIA = re.compile(r"\s+#(?: via|  )\s*([A-Za-z0-9._-]+)")


@dataclass
class Package:
    """A locked package."""

    name: str
    version: str
    hashes: list[str] = field(default_factory=list)
    needed_by: list[str] = field(default_factory=list)

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def read_lock(text: str) -> list[Package]:
    """Return the packages of a file that `uv pip compile --generate-hashes` wrote."""
    packages: list[Package] = []
    for line in text.splitlines():
        if pin := _PIN.match(line):
            packages.append(Package(_normal(pin[1]), pin[2]))
        elif found := _HASH.search(line):
            packages[-1].hashes.append(found[1])
        elif (via := _VIA.match(line)) and not via[1].startswith("-"):
            packages[-1].needed_by.append(_normal(via[1]))
    for package in packages:
        if not package.hashes:
            raise SystemExit(f"{package.name}: the lock has no hash for it")
    return packages


def bill(wheel: Path, lock: Path) -> dict[str, Any]:
    """Return the bill of a wheel and its dependencies."""
    packages = read_lock(lock.read_text())
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{digest} {lock.read_text()}")
    purls = {package.name: package.purl for package in packages}
    root = f"pkg:pypi/{name}@{version}"
    # The lock of build tools does not say what the wheel needs: take packages that no other needs.
    needs: dict[str, list[str]] = {root: [], **{purl: [] for purl in purls.values()}}
    for package in packages:
        for other in package.needed_by or [_ROOT]:
            needs[purls.get(other, root)].append(package.purl)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": name,
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
            "properties": [{"name": "spile:lock", "value": lock.name}],
        },
        "components": [
            {
                "type": "library",
                "bom-ref": package.purl,
                "name": package.name,
                "version": package.version,
                "purl": package.purl,
                "externalReferences": [
                    {
                        "type": "distribution",
                        "url": f"https://pypi.org/project/{package.name}/{package.version}/",
                        "hashes": [{"alg": "SHA-256", "content": each} for each in package.hashes],
                    }
                ],
            }
            for package in packages
        ],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(set(others))} for ref, others in needs.items()
        ],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(folder: Path, locks: list[Path]) -> None:
    wheels = sorted(folder.glob(f"{_ROOT}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise SystemExit(f"{folder}: no wheel there; `make wheel` makes it")
    wheel = wheels[-1]
    for lock in locks:
        target = lock.stem.removeprefix("requirements-")
        path = folder / f"{'-'.join(wheel.name.split('-')[:2])}-{target}.cdx.json"
        path.write_text(json.dumps(bill(wheel, lock), indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
