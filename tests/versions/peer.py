# SPDX-License-Identifier: Apache-2.0
"""An independent reader and writer of versions of weights.

It was written from the description of the format alone, and does not use Muster. The reader patches the local copy in
place, as SGLang's reader does. As a program it has the arguments of `muster publish` and `muster pull`:

    peer.py publish MODEL SOURCE --base DIR [--full] [--encoding xor|overwrite] [--checksum xxh3-128|adler32]
    peer.py pull SOURCE LOCAL --base DIR [--version N]
"""

import argparse
import ctypes
import ctypes.util
import fcntl
import json
import mmap
import os
import random
import re
import shutil
import sys
import time
import zlib
from collections import namedtuple
from pathlib import Path

INDEX = "model.safetensors.index.json"
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32,
        "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64}
Tensor = namedtuple("Tensor", "dtype shape data")


class Refused(Exception):
    """The reader cannot use a version."""


def library(name):
    found = ctypes.util.find_library(name)
    if found is None:
        print(f"skipped: there is no lib{name} to check with")
        sys.exit(77)
    return ctypes.CDLL(found)


# ---- zstd ----

ZSTD = library("zstd")
for _name, _result, *_arguments in [
        ("createCCtx", ctypes.c_void_p), ("freeCCtx", ctypes.c_size_t, ctypes.c_void_p),
        ("CCtx_setParameter", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
        ("compress2", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
        ("compressBound", ctypes.c_size_t, ctypes.c_size_t), ("isError", ctypes.c_uint, ctypes.c_size_t),
        ("createDStream", ctypes.c_void_p), ("freeDStream", ctypes.c_size_t, ctypes.c_void_p),
        ("decompressStream", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        ("getFrameContentSize", ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_size_t),
        ("findFrameCompressedSize", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
        ("getDictID_fromFrame", ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t)]:
    _function = getattr(ZSTD, "ZSTD_" + _name)
    _function.restype, _function.argtypes = _result, _arguments
ZSTD_LEVEL, ZSTD_WINDOW, ZSTD_SIZE, ZSTD_CHECKSUM = 100, 101, 200, 201
UNKNOWN_SIZE = (1 << 64) - 1


class ZstdBuffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("at", ctypes.c_size_t)]


def compress(data, level=1, sized=True, window=0, checksum=False):
    """Returns one frame, with its content size if `sized`."""
    context = ZSTD.ZSTD_createCCtx()
    for parameter, value in [(ZSTD_LEVEL, level), (ZSTD_SIZE, sized), (ZSTD_WINDOW, window), (ZSTD_CHECKSUM, checksum)]:
        if value or parameter == ZSTD_SIZE:
            ZSTD.ZSTD_CCtx_setParameter(context, parameter, int(value))
    bound = ZSTD.ZSTD_compressBound(len(data))
    target = ctypes.create_string_buffer(bound)
    size = ZSTD.ZSTD_compress2(context, target, bound, bytes(data), len(data))
    ZSTD.ZSTD_freeCCtx(context)
    assert not ZSTD.ZSTD_isError(size)
    return target.raw[:size]


def decompress(data, limit):
    """Returns the content of the first frame, of which more than `limit` bytes are an error."""
    stream = ZSTD.ZSTD_createDStream()
    source = ctypes.create_string_buffer(data, len(data)) if data else ctypes.create_string_buffer(1)
    given = ZstdBuffer(ctypes.addressof(source), len(data), 0)
    room = ctypes.create_string_buffer(1 << 17)
    content = bytearray()
    try:
        while True:
            taken = ZstdBuffer(ctypes.addressof(room), len(room), 0)
            state = ZSTD.ZSTD_decompressStream(stream, ctypes.byref(taken), ctypes.byref(given))
            if ZSTD.ZSTD_isError(state):
                raise Refused("damaged zstd frame")
            content += room.raw[:taken.at]
            if len(content) > limit:
                raise Refused("the frame is longer than the tensor")
            if state == 0:
                return bytes(content)
            if taken.at < len(room) and given.at == len(data):
                raise Refused("the zstd frame ends early")
    finally:
        ZSTD.ZSTD_freeDStream(stream)


# ---- checksums ----

class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


XXH3 = library("xxhash").XXH3_128bits
XXH3.restype, XXH3.argtypes = Hash128, [ctypes.c_char_p, ctypes.c_size_t]


def xxh3_128(data):
    value = XXH3(bytes(data), len(data))
    return f"{value.high:016x}{value.low:016x}"


CHECKSUMS = {"xxh3-128": xxh3_128, "adler32": lambda data: f"{zlib.adler32(data):08x}"}

# ---- safetensors, models ----


def read_header(path):
    """Returns metadata, {name: (dtype, shape, first byte in the file, length)}, and checks the layout of the file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise Refused(f"{path}: truncated header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise Refused(f"{path}: {error}") from error
    metadata = header.pop("__metadata__", {})
    end, tensors = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        elements = 1
        for extent in entry["shape"]:
            elements *= extent
        if first != end or 8 * (last - first) != elements * BITS[entry["dtype"]]:
            raise Refused(f"{path}: tensor {name}: wrong offsets")
        tensors[name] = entry["dtype"], entry["shape"], 8 + length + first, last - first
        end = last
    if 8 + length + end != size:
        raise Refused(f"{path}: {size} bytes, not {8 + length + end}")
    return metadata, tensors


def read_safetensors(path):
    metadata, header = read_header(path)
    data = Path(path).read_bytes()
    return metadata, {name: Tensor(dtype, tuple(shape), data[at:at + size]) for name, (dtype, shape, at, size) in header.items()}


def safetensors_bytes(tensors, metadata=None, padded=True):
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(tensor.data)]}
        at += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    if padded:
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def parts_of(tensors, count):
    """Deals the tensors out to `count` files, like ranks that own every count-th tensor."""
    parts = [{} for _ in range(count)]
    for i, (name, tensor) in enumerate(tensors.items()):
        parts[i % count][name] = tensor
    return parts


def write_model(folder, model, files=1, index=None, metadata=None):
    """Writes a Hugging Face model directory. `index`: whether it has one (default: if it has several files)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["TestModel"], "model_type": "test"}\n')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    parts = parts_of(model, files)
    names = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    for name, part in zip(names, parts):
        (folder / name).write_bytes(safetensors_bytes(part, {"format": "pt"}))
    if index if index is not None else files > 1:
        total = {"total_size": sum(len(tensor.data) for tensor in model.values())}
        text = {"metadata": {**total, **(metadata or {})},
                "weight_map": {key: name for name, part in zip(names, parts) for key in part}}
        (folder / INDEX).write_text(json.dumps(text))
    return folder


def read_model(folder):
    """Returns all tensors of a directory. If it has an index, both must agree."""
    model, places = {}, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in read_safetensors(path)[1].items():
            if name in model:
                raise Refused(f"{folder}: tensor {name} exists twice")
            model[name], places[name] = tensor, path.name
    index = Path(folder) / INDEX
    if index.exists() and json.loads(index.read_text())["weight_map"] != places:
        raise Refused(f"{folder}: the index and the files disagree")
    return model


# All kinds of shapes: odd sizes, no elements, a scalar, names with other characters.
SHAPES = {"model.embed_tokens.weight": ("BF16", (61, 7)), "model.layers.0.self_attn.q_proj.weight": ("BF16", (40, 33)),
          "model.layers.0.mlp.experts.0.weight": ("F8_E4M3", (33, 5)), "model.layers.0.mlp.experts.0.scale": ("F32", ()),
          "model.layers.0.mlp.down.weight": ("F8_E5M2", (9, 31)), "model.norm.weight": ("F32", (13,)),
          "model.steps": ("I64", (3, 1)), "model.zeros": ("I8", (17,)), "model.mask": ("BOOL", (5,)),
          "model.none": ("BF16", (0, 4)), "model.half": ("F16", (101,)), "model.d\u00fcnn/\"x\"": ("F64", (1, 1, 3)),
          "model.bytes": ("U8", (100003,)), "lm_head.weight": ("BF16", (61, 7))}


def make_model(seed, shapes=None):
    numbers = random.Random(seed)
    model = {}
    for name, (dtype, shape) in (shapes or SHAPES).items():
        size = BITS[dtype] // 8
        for extent in shape:
            size *= extent
        model[name] = Tensor(dtype, tuple(shape), bytes(n & 1 for n in numbers.randbytes(size)) if dtype == "BOOL" else numbers.randbytes(size))
    return model


def changed_model(model, numbers, share=0.01, tensors=0.7):
    """Returns a model in which about `share` of the elements of most tensors have another value."""
    result = {}
    for name, tensor in model.items():
        data, item = bytearray(tensor.data), BITS[tensor.dtype] // 8
        count = len(data) // item
        if count and numbers.random() < tensors:
            for _ in range(max(1, int(count * share))):
                at = item * numbers.randrange(count) + numbers.randrange(item)
                data[at] ^= 1 if tensor.dtype == "BOOL" else numbers.randrange(1, 256)
        result[name] = tensor._replace(data=bytes(data))
    return result


# ---- encodings ----


def xor(a, b):
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def encode(encoding, old, new):
    if encoding == "xor":
        return xor(old, new)
    positions = [i for i in range(len(new)) if old[i] != new[i]]
    return overwriting(positions, [new[i] for i in positions])


def overwriting(positions, values):
    return b"".join(number.to_bytes(4, "little") for number in [len(positions), *positions]) + bytes(values)


def applied(encoding, old, delta):
    if encoding == "xor":
        if len(delta) != len(old):
            raise Refused("wrong length of an xor")
        return xor(old, delta)
    count = int.from_bytes(delta[:4], "little")
    if len(delta) != 4 + 5 * count:
        raise Refused("wrong length of a list of positions")
    new = bytearray(old)
    for i in range(count):
        position = int.from_bytes(delta[4 + 4 * i:8 + 4 * i], "little")
        if position >= len(new):
            raise Refused("a position past the end")
        new[position] = delta[4 + 4 * count + i]
    return bytes(new)


# ---- writer ----


def version_name(number):
    return f"weight_v{number:06d}"


def put(path, data):
    """Writes a file under another name, syncs it and renames it."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


class Writer:
    """Publishes versions. `style` has the defaults of the keywords of delta()."""

    def __init__(self, source, base, number=0, **style):
        self.source, self.model, self.number, self.style = Path(source), base, number, style
        self.source.mkdir(parents=True, exist_ok=True)

    def delta(self, model, **style):
        style = {"encoding": "xor", "checksum": "xxh3-128", "files": 1, "sized": True, "padded": True, "level": 1,
                 "metadata": {}, "frame": None, **self.style, **style}
        self.number += 1
        folder = self.source / version_name(self.number)
        folder.mkdir()
        changed = {name: tensor for name, tensor in model.items() if tensor.data != self.model[name].data}
        parts = [part for part in parts_of(changed, style["files"]) if part]
        weight_map = {}
        for i, part in enumerate(parts):
            name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
            stored, sums = {}, {}
            for key, tensor in part.items():
                content = encode(style["encoding"], self.model[key].data, tensor.data)
                frame = compress(content, style["level"], style["sized"], checksum=bool(style["frame"]))
                stored[key] = Tensor("U8", (len(frame),), frame)
                sums[key] = CHECKSUMS[style["checksum"]](tensor.data)
                weight_map[key] = name
            put(folder / name, safetensors_bytes(stored, sums, style["padded"]))
        put(folder / INDEX, json.dumps({
            "metadata": {"version": f"{self.number:06d}", "base_version": f"{self.number - 1:06d}",
                         "delta_encoding": style["encoding"], "compression_format": "zstd",
                         "checksum_format": style["checksum"], **style["metadata"]},
            "weight_map": weight_map}).encode())
        self.model = model
        return folder

    def full(self, model, files=1, metadata=None):
        """Writes a full version, with an index that is written last."""
        self.number += 1
        self.model = model
        return write_model(self.source / version_name(self.number), model, files, index=True, metadata=metadata)


# ---- reader ----

def sync_folder(local):
    return Path(local) / ".weight_sync"


def marker(local):
    try:
        return int(json.loads((sync_folder(local) / "state.json").read_text())["version"])
    except FileNotFoundError:
        return None


def set_marker(local, number):
    put(sync_folder(local) / "state.json", json.dumps({"version": f"{number:06d}"}).encode())


def is_delta(folder):
    if not folder.is_dir():
        raise Refused(f"{folder}: missing version")
    index = folder / INDEX
    return index.exists() and "delta_encoding" in json.loads(index.read_text()).get("metadata", {})


def pull(local, base, source, target):
    """Brings the local copy to a version, in place."""
    local, source = Path(local), Path(source)
    sync_folder(local).mkdir(parents=True, exist_ok=True)
    with open(sync_folder(local) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at = marker(local)
        first = target
        while first > (at or 0) and is_delta(source / version_name(first)):
            first -= 1
        if at is None or first > at:
            seed(Path(base) if first == 0 else source / version_name(first), local)
            set_marker(local, first)
            at = first
        for number in range(at + 1, target + 1):
            apply_version(local, source / version_name(number))


def seed(origin, local):
    names = [entry.name for entry in os.scandir(origin) if entry.is_file()]
    for name in names:
        shutil.copy(origin / name, local / name)
    for entry in os.scandir(local):
        if entry.is_file() and entry.name not in names:
            os.remove(entry)


def apply_version(local, folder):
    words = json.loads((folder / INDEX).read_text())["metadata"]
    if marker(local) == int(words["version"]):
        return
    if marker(local) != int(words["base_version"]) or words["compression_format"] != "zstd":
        raise Refused(f"{folder}: another base or compression")
    places = {}
    for path in local.glob("*.safetensors"):
        places.update({name: (path, *entry[2:]) for name, entry in read_header(path)[1].items()})
    wrong = []
    for path in sorted(folder.glob("*.safetensors")):
        sums, tensors = read_safetensors(path)
        for name, tensor in tensors.items():
            file, at, size = places[name]
            if words["delta_encoding"] == "overwrite" and ZSTD.ZSTD_getFrameContentSize(tensor.data, len(tensor.data)) == UNKNOWN_SIZE:
                raise Refused(f"{path}: {name}: a frame without its content size")
            with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
                delta = decompress(tensor.data, 5 * size + 4)
                mapped[at:at + size] = applied(words["delta_encoding"], mapped[at:at + size], delta)
                if CHECKSUMS[words["checksum_format"]](mapped[at:at + size]) != sums.get(name):
                    wrong.append(name)
    if wrong:
        raise Refused(f"{folder}: wrong checksums: {wrong}")
    set_marker(local, int(words["version"]))


# ---- the format, item by item ----


def check_delta(folder, number, checksum="xxh3-128", files=None):
    """Checks a delta against every item of the format, and returns the number of its tensors."""
    folder = Path(folder)

    def check(condition, words):
        if not condition:
            raise Refused(f"{folder}: {words}")

    index = json.loads((folder / INDEX).read_text())
    words = index["metadata"]
    check(all(isinstance(value, str) for value in words.values()), "a value of the metadata is not a string")
    check((words["version"], words["base_version"]) == (f"{number:06d}", f"{number - 1:06d}"), "other numbers")
    check(words["compression_format"] == "zstd" and words["checksum_format"] == checksum, "other formats")
    encoding = words["delta_encoding"]
    check(encoding in ("xor", "overwrite"), "another encoding")
    names = sorted(path.name for path in folder.iterdir())
    data_files = [f"model-{i:05d}-of-{len(names) - 1:05d}.safetensors" for i in range(len(names) - 1)]
    check(names == sorted([*data_files, INDEX]), f"other files: {names}")
    places = {}
    for name in data_files:
        path = folder / name
        check(int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, f"{name}: the header is not padded")
        sums, tensors = read_safetensors(path)
        check(tensors, f"{name}: no tensors")
        for key, tensor in tensors.items():
            at, data = f"{name}: {key}: ", tensor.data
            check(key not in places, at + "it exists twice")
            places[key] = name
            check((tensor.dtype, tensor.shape) == ("U8", (len(data),)), at + "another dtype or shape")
            check(ZSTD.ZSTD_findFrameCompressedSize(data, len(data)) == len(data), at + "not one frame")
            check(ZSTD.ZSTD_getDictID_fromFrame(data, len(data)) == 0, at + "a dictionary")
            size = ZSTD.ZSTD_getFrameContentSize(data, len(data))
            content = decompress(data, 1 << 40)
            check(size == len(content), at + "no content size")
            check(re.fullmatch("[0-9a-f]{32}" if checksum == "xxh3-128" else "[0-9a-f]{8}", sums[key]), at + "checksum")
            if encoding == "xor":
                check(any(content), at + "it did not change")
            else:
                count = int.from_bytes(content[:4], "little")
                check(count > 0 and len(content) == 4 + 5 * count, at + "another length")
                positions = [int.from_bytes(content[4 + 4 * i:8 + 4 * i], "little") for i in range(count)]
                check(all(a < b for a, b in zip(positions, positions[1:])), at + "positions do not ascend")
    check(index["weight_map"] == places, "the index and the files disagree")
    return len(places)


# ---- program ----


def newest(source):
    return max([int(name[8:]) for name in os.listdir(source) if re.fullmatch(r"weight_v\d{6}", name)], default=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["publish", "pull"])
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--base", required=True)
    parser.add_argument("--version")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--encoding", default="xor")
    parser.add_argument("--checksum", default="xxh3-128")
    parser.add_argument("--wait", default="0s")
    options, _ = parser.parse_known_args()  # others of Muster's options have no effect here
    if options.command == "pull":
        named = options.version not in (None, "newest")
        limit = time.monotonic() + float(options.wait.rstrip("s"))
        while named and not (Path(options.first) / version_name(int(options.version)) / INDEX).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        pull(options.second, options.base, options.first, int(options.version) if named else newest(options.first))
        return
    Path(options.second).mkdir(parents=True, exist_ok=True)
    number = newest(options.second)
    before = f"{options.second}.before"
    shutil.rmtree(before, ignore_errors=True)
    pull(before, options.base, options.second, number)
    old = read_model(before)
    shutil.rmtree(before)
    model = read_model(options.first)
    writer = Writer(options.second, old, number, encoding=options.encoding, checksum=options.checksum)
    shapes = {name: tensor[:2] for name, tensor in model.items()}
    if options.full or shapes != {name: tensor[:2] for name, tensor in old.items()}:
        writer.full(model, metadata={"version": f"{number + 1:06d}"})
    else:
        writer.delta(model)


if __name__ == "__main__":
    try:
        main()
    except (Refused, OSError, ValueError, KeyError) as error:
        print("peer:", error, file=sys.stderr)
        sys.exit(2)
