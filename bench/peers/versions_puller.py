# SPDX-License-Identifier: Apache-2.0
"""A reference puller of versions of weights, as engines have today: it copies the base, then patches the copy in place
through mmap, one delta after another, with a thread per tensor and core. Arguments: SOURCE LOCAL BASE VERSION; an existing
LOCAL is at version 0. Needs numpy, zstandard and xxhash. Prints seconds.
"""

import json
import mmap
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import xxhash
import zstandard

PIECE = 2 << 20


def header_of(file):
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return header.pop("__metadata__", {}), header, 8 + length


def places_in(local):
    """Returns {name: (mapping of its file, first byte, last byte)}."""
    places = {}
    for path in local.glob("*.safetensors"):
        with open(path, "r+b") as file:
            _, header, start = header_of(file)
            mapped = numpy.frombuffer(mmap.mmap(file.fileno(), 0), numpy.uint8)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            places[name] = mapped[start + first:start + last]
    return places


def apply(work):
    """Decompresses, applies and hashes a tensor in pieces that stay in the cache."""
    target, frame, encoding, expected = work
    digest = xxhash.xxh3_128()
    if encoding == "xor":
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            for at in range(0, len(target), PIECE):
                piece = target[at:at + PIECE]
                piece ^= numpy.frombuffer(reader.read(len(piece)), numpy.uint8)
                digest.update(piece)
    else:
        delta = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(frame), numpy.uint8)
        count = int(delta[:4].view("<u4")[0])
        target[delta[4:4 + 4 * count].view("<u4")] = delta[4 + 4 * count:]
        digest.update(target)
    if digest.hexdigest() != expected:
        raise SystemExit("a checksum differs")


def main():
    source, local, base, target = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    began = time.perf_counter()
    if not local.exists():
        local.mkdir()
        for path in base.iterdir():
            shutil.copyfile(path, local / path.name)
    places = places_in(local)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number in range(1, target + 1):
            folder = source / f"weight_v{number:06d}"
            encoding = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["delta_encoding"]
            works = []
            for path in sorted(folder.glob("*.safetensors")):
                data = path.read_bytes()
                with open(path, "rb") as file:
                    sums, header, start = header_of(file)
                for name, entry in header.items():
                    first, last = entry["data_offsets"]
                    works.append((places[name], memoryview(data)[start + first:start + last], encoding, sums[name]))
            list(pool.map(apply, works))
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
