# SPDX-License-Identifier: Apache-2.0
"""Prints the SBOM of a release, which lists the third-party parts of the wheels. Format: SPDX 2.3.

usage: sbom.py VERSION TIME FOLDER. FOLDER is the one in which tools/wheels has built them.
"""

import json
import subprocess
import sys
from pathlib import Path

# Debian's package, and the licence of its linked part.
COMPILED = {"hdf5": "BSD-3-Clause", "libisal": "BSD-3-Clause", "libzstd": "BSD-3-Clause", "re2": "BSD-3-Clause", "xxhash": "BSD-2-Clause", "zlib": "Zlib"}
HEADERS = {"libboost-dev": "BSL-1.0", "libfmt-dev": "MIT", "nlohmann-json3-dev": "MIT", "libcli11-dev": "BSD-3-Clause", "libstdc++-12-dev": "GPL-3.0-or-later WITH GCC-exception-3.1"}


def package(name, version, licence):
    identity = "SPDXRef-" + "".join(letter if letter.isalnum() else "-" for letter in name)
    return {"SPDXID": identity, "name": name, "versionInfo": version, "licenseConcluded": licence, "downloadLocation": "NOASSERTION", "filesAnalyzed": False}


def main():
    version, time, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    sources = folder / "sources"
    packages = [package("muster", version, "Apache-2.0")]
    for name, licence in COMPILED.items():
        found = sorted(sources.glob(f"{name}_*.dsc"))
        if not found:
            sys.exit(f"sbom.py: '{sources}' has no sources of {name}: run tools/wheels first")
        packages.append(package(name, found[-1].stem.split("_", 1)[1], licence))
    for name, licence in HEADERS.items():
        installed = subprocess.run(["dpkg-query", "-W", "-f=${Version}", name], capture_output=True, text=True)
        if installed.returncode != 0:
            sys.exit(f"sbom.py: the version of {name} is not known: install it (apt-get install {name})")
        packages.append(package(name, installed.stdout, licence))
    nanobind = {found.stem.split("-")[1] for found in folder.glob("python3*/lib/python3*/site-packages/nanobind-*.dist-info")}
    if len(nanobind) != 1:
        sys.exit(f"sbom.py: '{folder}' has environments with the versions {sorted(nanobind)} of nanobind: remove them, and run tools/wheels")
    packages.append(package("nanobind", *nanobind, "BSD-3-Clause"))
    # src/report/page/vendor/README.md
    packages.append(package("echarts", "6.1.0", "Apache-2.0"))
    relations = [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-muster"}]
    relations += [{"spdxElementId": "SPDXRef-muster", "relationshipType": "CONTAINS", "relatedSpdxElement": each["SPDXID"]} for each in packages[1:]]
    document = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"muster-{version}",
        "documentNamespace": f"urn:muster:{version}", "creationInfo": {"created": time, "creators": ["Tool: packaging/sbom.py"]},
        "packages": packages, "relationships": relations,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
