# SPDX-License-Identifier: Apache-2.0
"""A reader of state files that uses only docs/reference/state-file.md. It computes and compares every checksum that the
page names. Run it with a program that writes state files with every feature into a folder.
"""

import ctypes
import ctypes.util
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

BITS = {0: 8, 1: 8, 2: 8, 3: 16, 4: 16, 5: 32, 6: 32, 7: 64, 8: 64, 9: 16, 10: 16, 11: 32, 12: 64, 13: 8, 14: 8, 15: 8,
        16: 4, 17: 4, 18: 4, 19: 64, 20: 8, 21: 8, 22: 6, 23: 6}


def library(name):
    found = ctypes.util.find_library(name)
    if found is None:
        print(f"skipped: there is no lib{name} to check with")
        sys.exit(77)
    return ctypes.CDLL(found)


def make_checksum():
    function = library("xxhash").XXH3_64bits
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_size_t]
    return lambda data: function(data, len(data))


def make_decompress():
    function = library("zstd").ZSTD_decompress
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]

    def decompress(data, size):
        target = ctypes.create_string_buffer(size)
        assert function(target, size, data, len(data)) == size
        return target.raw

    return decompress


checksum, decompress = make_checksum(), make_decompress()


def number(data, at, size=8):
    return int.from_bytes(data[at:at + size], "little")


def product(numbers):
    result = 1
    for value in numbers:
        result *= value
    return result


def unshuffle(data, item):
    count = len(data) // item
    result = bytearray(len(data))
    for byte in range(item):
        result[byte::item] = data[byte * count:(byte + 1) * count]
    return bytes(result)


def read_catalogue(data, tensors):
    assert data[:8] == b"MSMCTLG1" and data[40:64] == bytes(24)
    counts = struct.unpack("<4Q", data[8:40])
    assert counts[0] == tensors and len(data) == 64 + 64 * counts[0] + 8 * counts[1] + 24 * counts[2] + counts[3]
    extents_at = 64 + 64 * counts[0]
    chunks_at = extents_at + 8 * counts[1]
    names_at = chunks_at + 24 * counts[2]
    found = []
    for i in range(tensors):
        entry = data[64 + 64 * i:128 + 64 * i]
        keys = ("offset", "stored", "checksum", "bytes", "rows", "first", "name", "dtype", "rank", "dim")
        tensor = dict(zip(keys, struct.unpack("<6QIBBB", entry[:55])))
        assert entry[55:] == bytes(9)
        tensor["shape"] = struct.unpack(f"<{tensor['rank']}q", data[extents_at:extents_at + 8 * tensor["rank"]])
        extents_at += 8 * tensor["rank"]
        length = tensor["name"]
        tensor["name"] = data[names_at:names_at + length].decode()
        names_at += length
        assert tensor["bytes"] == (product(tensor["shape"]) * BITS[tensor["dtype"]] + 7) // 8
        found.append(tensor)
    assert names_at == len(data)
    chunks = [struct.unpack("<QIIQ", data[chunks_at + 24 * i:chunks_at + 24 * i + 24]) for i in range(counts[2])]
    return found, chunks


def read_chunked(data, tensor, chunks):
    packed = BITS[tensor["dtype"]] < 8
    item = 1 if packed else BITS[tensor["dtype"]] // 8
    shape = (tensor["bytes"],) if packed else tensor["shape"]
    dim, rows = tensor["dim"], tensor["rows"]
    row = item * product(shape[dim + 1:])
    per = -(-shape[dim] // rows)
    result, stored_bytes = bytearray(), 0
    for i in range(product(shape[:dim]) * per):
        offset, size, mask, wanted = chunks[tensor["first"] + i]
        stored = data[offset:offset + size]
        stored_bytes += size
        assert checksum(stored) == wanted
        if mask == 0:
            whole = decompress(stored, rows * row)
            whole = unshuffle(whole, item) if item > 1 else whole
        else:
            assert mask == (3 if item > 1 else 1) and size == rows * row
            whole = stored
        begin = ((i // per) * shape[dim] + (i % per) * rows) * row
        has = min(rows, shape[dim] - (i % per) * rows) * row
        assert begin == len(result) and whole[has:] == bytes(len(whole) - has)
        result += whole[:has]
    assert stored_bytes == tensor["stored"]
    return bytes(result)


def rest_of(data, tensors, chunks):
    taken = [(t["offset"], t["bytes"]) for t in tensors if t["rows"] == 0 and t["bytes"] != 0]
    taken += [(offset, size) for offset, size, _, _ in chunks]
    result, end = b"", 4096
    for offset, size in sorted(taken):
        assert offset >= end
        result += data[end:offset]
        end = offset + size
    return result + data[end:]


def read(path):
    data = path.read_bytes()
    mark = data[:4096]
    assert mark[:8] == bytes.fromhex("934d5553540d0a1a")
    assert checksum(mark[:4088]) == number(mark, 4088)
    assert number(mark, 8, 4) == 1 and number(mark, 12, 4) == 4096 and mark[128:4088] == bytes(3960)
    assert number(mark, 48) == len(data)
    assert checksum(data[4096:4144]) == number(mark, 112) and data[4096:4104] == b"\x89HDF\r\n\x1a\n"
    catalogue = data[number(mark, 64):number(mark, 64) + number(mark, 72)]
    assert checksum(catalogue) == number(mark, 80)
    config = data[number(mark, 88):number(mark, 88) + number(mark, 96)]
    assert checksum(config) == number(mark, 104)
    assert json.loads(config) == {"name": "Gewicht é", "list": [1, 2.5, None]}
    tensors, chunks = read_catalogue(catalogue, number(mark, 56))
    assert checksum(rest_of(data, tensors, chunks)) == number(mark, 120)
    for tensor in tensors:
        if tensor["rows"] != 0:
            elements = read_chunked(data, tensor, chunks)
        else:
            assert tensor["stored"] == tensor["bytes"] and tensor["offset"] % 64 == 0
            assert tensor["offset"] % 4096 == 0 or tensor["bytes"] < 65536
            elements = data[tensor["offset"]:tensor["offset"] + tensor["bytes"]]
        assert checksum(elements) == tensor["checksum"], tensor
    return (number(mark, 32), number(mark, 40, 4), number(mark, 44, 4)), tensors, chunks


def main():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.argv[1], folder], check=True)
        info, plain, chunks = read(Path(folder) / "plain.h5")
        assert info == (7, 3, 5) and not chunks
        _, compressed, chunks = read(Path(folder) / "compressed.h5")
        assert {mask == 0 for _, _, mask, _ in chunks} == {True, False}
        for one, other in zip(plain, compressed):
            assert all(one[key] == other[key] for key in ("name", "dtype", "shape", "bytes", "checksum"))
        print(f"{len(plain)} tensors and {len(chunks)} chunks are what the page says")


if __name__ == "__main__":
    main()
