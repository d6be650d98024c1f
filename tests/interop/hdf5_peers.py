# SPDX-License-Identifier: Apache-2.0
"""Muster reads files of h5py: every supported layout, filter and type, and refusals with their messages. h5py, h5ls, h5dump,
h5repack and h5diff read Muster's state files. Argument: Muster's peer program.

Exit status: 0, 1, or 77 if h5py, hdf5plugin or numpy cannot be imported (skipped).
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import checks
from checks import check

try:
    import h5py
    import hdf5plugin
    import numpy
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has h5py, hdf5plugin and numpy", file=sys.stderr)
    sys.exit(77)

peer = sys.argv[1]
random = numpy.random.default_rng(3)


def run(*arguments):
    result = subprocess.run([peer, *arguments], capture_output=True, text=True)
    check(result.returncode == 0, f"{arguments}: {result.stderr}")
    return result.stdout


# A few elements, some rows, and the whole tensor.
PIECES = (48, 1008, 1 << 20)


def listing(path):
    """Returns the listing of a file, with dumps of its tensors' bytes, read in pieces of each size."""
    found = json.loads(run("list", path))
    found["by_name"] = {tensor["name"]: {**tensor, "number": i} for i, tensor in enumerate(found["tensors"])}
    found["dump"] = path + ".dump"
    os.mkdir(found["dump"])
    run("dump", path, found["dump"], *map(str, PIECES))
    found["words"] = {}
    for issue in found["issues"]:
        found["words"].setdefault(issue["path"], []).append(issue["words"])
    return found


def refused(found, path, words):
    check(path not in found["by_name"], path + " is shown")
    check(any(words in line for line in found["words"].get(path, [])), f"{path}: {found['words'].get(path)}")


def expect(found, name, array, dtype):
    """Checks that a tensor exists and has these elements, little-endian, with every piece size."""
    array = numpy.asarray(array)
    tensor = found["by_name"].get(name)
    check(tensor is not None, f"{name} is not there: {found['words'].get(name)}")
    check(tensor["dtype"] == dtype and tensor["shape"] == list(array.shape), f"{name}: {tensor}")
    expected = array.astype(array.dtype.newbyteorder("<")).tobytes()
    for piece in PIECES:
        with open(os.path.join(found["dump"], f"{tensor['number']}.{piece}"), "rb") as file:
            check(file.read() == expected, f"{name} in pieces of {piece}: other elements")


TYPES = {"bool": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64",
         "i8": "I64", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64"}


def values(dtype, shape):
    count = int(numpy.prod(shape, dtype=int))
    kind = numpy.dtype(dtype)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return random.integers(0, 256, count * kind.itemsize, dtype="u1").view(kind.newbyteorder("<")).reshape(shape).astype(kind)
    if kind.kind == "c":
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(kind)
    return random.normal(size=shape).astype(kind)


def types(folder):
    path = os.path.join(folder, "types.h5")
    arrays = {}
    with h5py.File(path, "w") as file:
        for name in TYPES:
            for order in "<>":
                dtype = numpy.dtype(name) if name == "bool" else numpy.dtype(order + name)
                arrays[f"{name}{'be' if order == '>' else 'le'}"] = (values(dtype, (3, 5)), TYPES[name])
            arrays[name + ".scalar"] = (values(name, ()), TYPES[name])
            arrays[name + ".empty"] = (values(name, (0, 4)), TYPES[name])
        for name, (array, _) in arrays.items():
            file[name] = array
    found = listing(path)
    check(not found["issues"] or not found["seccomp"], found["issues"])
    for name, (array, dtype) in arrays.items():
        expect(found, name, array, dtype)


def custom_floats(folder):
    """Floats without an HDF5 name: their bits are kept."""
    path = os.path.join(folder, "floats.h5")
    formats = {"BF16": (2, (15, 7, 8, 0, 7), 127), "F8_E5M2": (1, (7, 2, 5, 0, 2), 15), "F8_E4M3": (1, (7, 3, 4, 0, 3), 7)}
    bits = {}
    with h5py.File(path, "w") as file:
        for name, (size, fields, bias) in formats.items():
            kind = h5py.h5t.IEEE_F32LE.copy()
            kind.set_fields(*fields)
            kind.set_offset(0)
            kind.set_precision(8 * size)
            kind.set_size(size)
            kind.set_ebias(bias)
            bits[name] = numpy.arange(1 << (8 * size), dtype=f"<u{size}")
            space = h5py.h5s.create_simple(bits[name].shape)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, bits[name], kind)
        odd = h5py.h5t.IEEE_F32LE.copy()
        odd.set_fields(30, 22, 8, 0, 22)
        odd.set_precision(31)
        h5py.h5d.create(file.id, b"odd", odd, h5py.h5s.create_simple((2,)))
    found = listing(path)
    for name, array in bits.items():
        expect(found, name, array, name)
    refused(found, "odd", "8 exponent and 22 mantissa bits")


def chunks(folder):
    path = os.path.join(folder, "chunks.h5")
    arrays = {}
    filters = {
        "plain": {},
        "gzip": {"compression": "gzip"},
        "gzip9": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
        "shuffle": {"shuffle": True},
        "fletcher": {"fletcher32": True},
        "all": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "zstd": dict(hdf5plugin.Zstd(clevel=1)),
        "zstds": dict(shuffle=True, **hdf5plugin.Zstd(clevel=3)),
        "zstdf": dict(shuffle=True, fletcher32=True, **hdf5plugin.Zstd()),
    }
    shapes = {(1000,): (64,), (1,): (1,), (37, 53): (8, 16), (100, 7): (33, 7), (9, 10, 11): (4, 3, 5),
              (5, 6, 7, 8): (2, 6, 3, 5), (4, 3, 2, 5): (1, 3, 2, 5)}
    # Old groups and B-trees, and the indices of HDF5 1.10. An older libhdf5 cannot read the latest format of HDF5 2.0.
    for libver in ["earliest", "v110"]:
        with h5py.File(path, "a", libver=(libver, "v110")) as file:
            for label, options in filters.items():
                for shape, chunk in shapes.items():
                    name = f"{libver}/{label}/{'x'.join(map(str, shape))}"
                    dtype = ["u2", ">f8", "f4", "u1", "c8"][len(arrays) % 5]
                    arrays[name] = values(dtype, shape)
                    file.create_dataset(name, data=arrays[name], chunks=chunk, **options)
            for label, most in {"one": (None,), "two": (None, None)}.items():
                name = f"{libver}/unlimited/{label}"
                arrays[name] = values("i4", (50, 30)[: len(most)])
                file.create_dataset(name, data=arrays[name], chunks=(7, 9)[: len(most)], maxshape=most, shuffle=True)
            # Random data, which cannot be compressed.
            name = f"{libver}/incompressible"
            arrays[name] = numpy.frombuffer(random.bytes(3 * 4096), "<u4")
            file.create_dataset(name, data=arrays[name], chunks=(1000,), shuffle=True, **hdf5plugin.Zstd())
    found = listing(path)
    names = {"u2": "U16", "f8": "F64", "f4": "F32", "u1": "U8", "c8": "C64", "i4": "I32", "u4": "U32"}
    for name, array in arrays.items():
        dtype = names[array.dtype.str.lstrip("<>|=")]
        expect(found, name, array, dtype)
        check(found["by_name"][name]["stored"] > 0, name)


def parts_of_chunks(folder):
    """Chunks that were never written, chunks that were written unfiltered, and chunks larger than the dataset."""
    path = os.path.join(folder, "parts.h5")
    with h5py.File(path, "w") as file:
        sparse = file.create_dataset("sparse", shape=(90, 110), chunks=(16, 20), dtype=">i4", fillvalue=-7,
                                     compression="gzip")
        sparse[20:40, 30:95] = 5
        file.create_dataset("untouched", shape=(30, 4), chunks=(16, 4), dtype="f8", fillvalue=2.5)
        file.create_dataset("late", shape=(6,), dtype="u2", fillvalue=258)
        mixed = file.create_dataset("mixed", shape=(4, 8), chunks=(1, 8), dtype="u1", compression="gzip", shuffle=True)
        for row in range(4):
            raw = bytes(range(8 * row, 8 * row + 8))
            if row % 2:
                mixed.id.write_direct_chunk((row, 0), raw, 0b11)
            else:
                import zlib
                mixed.id.write_direct_chunk((row, 0), zlib.compress(raw), 0b01)
        wide = file.create_dataset("wide", shape=(3,), chunks=(100,), maxshape=(None,), dtype="i2")
        wide[...] = [1, 2, 3]
        expected = {"sparse": sparse[...], "untouched": file["untouched"][...], "late": file["late"][...],
                    "mixed": numpy.arange(32, dtype="u1").reshape(4, 8), "wide": wide[...]}
    found = listing(path)
    types_ = {"sparse": "I32", "untouched": "F64", "late": "U16", "mixed": "U8", "wide": "I16"}
    for name, array in expected.items():
        expect(found, name, array, types_[name])
    check(found["by_name"]["late"]["stored"] == 0, "late")


def compact(folder):
    path = os.path.join(folder, "compact.h5")
    with h5py.File(path, "w") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.COMPACT)
        array = values(">f4", (5, 6))
        dataset = h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32BE, h5py.h5s.create_simple((5, 6)), create)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    expect(listing(path), "compact", array, "F32")


def texts_and_refusals(folder):
    path = os.path.join(folder, "texts.h5")
    with h5py.File(path, "w", userblock_size=1024) as file:
        file.attrs["format"] = "pt"
        file.attrs["fixed"] = numpy.bytes_(b"padded")
        file.attrs["count"] = 12
        file.attrs["scale"] = 0.5
        file.attrs["list"] = ["a", 'b"\n', "\u00fc"]
        file.attrs["numbers"] = numpy.arange(4)
        group = file.create_group("model/layers/0")
        group.attrs["kind"] = "attention"
        group["weight"] = numpy.ones((2, 2), "f4")
        group["weight"].attrs["note"] = "\u00e4rger"
        file["config"] = json.dumps({"hidden": 4})
        file["names"] = ["x", "y"]
        file["bytes"] = numpy.array([b"ab", b"cdef"])
        file["long"] = "l" * 100_000
        file["compound"] = numpy.zeros(3, [("a", "i4"), ("b", "f8")])
        file["complex128"] = numpy.zeros(3, "c16")
        file["enumeration"] = numpy.zeros(2, h5py.enum_dtype({"RED": 0, "GREEN": 1}, "i1"))
        file["opaque"] = numpy.zeros(2, "V5")
        file["reference"] = numpy.array([file["config"].ref], dtype=h5py.ref_dtype)
        file["lists"] = numpy.array([numpy.arange(2), numpy.arange(3)], dtype=object).astype(h5py.vlen_dtype("i4"))
        file["array"] = numpy.zeros(2, [("", "(3,)f4")])
        file["null"] = h5py.Empty("f4")
        file["named"] = numpy.dtype("f8")
        file["soft"] = h5py.SoftLink("/config")
        file["external"] = h5py.ExternalLink("other.h5", "/x")
        file["again"] = file["model/layers/0/weight"]
        for name, options in {"lzf": {"compression": "lzf"}, "scale": {"scaleoffset": 2, "dtype": "i4"},
                              "blosc": dict(hdf5plugin.Blosc()), "bitshuffle": dict(hdf5plugin.Bitshuffle()),
                              "lz4": dict(hdf5plugin.LZ4())}.items():
            dtype = options.pop("dtype", "f4")
            file.create_dataset(name, data=numpy.ones(100, dtype), chunks=(50,), **options)
        virtual = h5py.VirtualLayout((4,), "f4")
        virtual[:] = h5py.VirtualSource("nowhere.h5", "y", (4,))
        file.create_virtual_dataset("virtual", virtual)
        file.create_dataset("elsewhere", (4,), "f4", external=[(os.path.join(folder, "raw.bin"), 0, 16)])
    found = listing(path)
    meta = found["metadata"]
    expected = {"@format": "pt", "@fixed": "padded", "@count": "12", "@scale": "0.5", "model/layers/0@kind": "attention",
                "config": '{"hidden": 4}'}
    for name, text in expected.items():
        check(meta.get(name) == text, f"{name}: {meta.get(name)}")
    check(json.loads(meta["@list"]) == ["a", 'b"\n', "\u00fc"], meta["@list"])
    check(json.loads(meta["names"]) == ["x", "y"] and json.loads(meta["bytes"]) == ["ab", "cdef"], meta)
    shown = set(found["by_name"])
    # Either of the two names of the weight may come first.
    weight = shown & {"model/layers/0/weight", "again"}
    check(shown - weight == set() and len(weight) == 1, shown)
    refused(found, ({"model/layers/0/weight", "again"} - weight).pop(), "another name of the dataset")
    check(meta.get(weight.pop() + "@note") == "\u00e4rger", meta)
    words = {"compound": "a compound of 2 members", "complex128": "complex numbers of two other floats",
             "enumeration": "an enumeration of 2 names", "opaque": "opaque", "reference": "references",
             "lists": "variable length", "array": "compound", "null": "no shape", "named": "named datatype",
             "soft": 'soft link to "/config"', "external": "other.h5 : /x", "lzf": "lzf (32000)",
             "scale": "scale-offset", "blosc": "blosc (32001)", "bitshuffle": "bitshuffle (32008)",
             "lz4": "lz4 (32004)", "virtual": "virtual dataset", "elsewhere": "in another file", "long": "too long"}
    for name, text in words.items():
        refused(found, name, text)
    check(any("1 of its attributes" in line for line in found["words"][""]), found["words"])


def written(dtype, shape):
    """Returns the bytes that the peer writes for a tensor of a state file."""
    sixteen = dtype in ("F16", "BF16", "I16", "U16")
    bits = {"BOOL": 8, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F4": 4, "U4": 4, "I4": 4,
            "F6_E2M3": 6, "F6_E3M2": 6}
    count = int(numpy.prod(shape, dtype=int))
    i = numpy.arange((count * (16 if sixteen else bits.get(dtype, 8)) + 7) // 8)
    value = numpy.where(i % 2 == 0, i // 2, i // 512) if sixteen else i + i // 256 * 7
    return ((value % 2 if dtype == "BOOL" else value) & 255).astype("u1").tobytes()


NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
         "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8"}
BYTES = ["F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
PACKED = ["F4", "U4", "I4", "F6_E2M3", "F6_E3M2"]
OTHERS = {"model.layers.0.weight": ("F32", (300, 1000)), "a%2Fb": ("U8", (3,)), "100%25": ("U8", (3,)),
          "%2E%2E": ("U8", (3,)), "\u00fc \"quoted\"%0A": ("U8", (3,))}


def state_tensors():
    """Returns the link names, dtypes and shapes that the peer writes."""
    for dtype in [*NUMPY, "BF16", "F8_E5M2", *BYTES, *PACKED]:
        yield dtype, dtype, (256, 256) if dtype in ("F16", "BF16", "I16", "U16") else (7, 11)
        yield dtype + ".scalar", dtype, ()
        yield dtype + ".empty", dtype, (0, 5)
    for name, (dtype, shape) in OTHERS.items():
        yield name, dtype, shape


def same(a, b):
    """Returns whether two numbers are equal, or both NaN."""
    return a.shape == b.shape and bool(numpy.all((a == b) | ((a != a) & (b != b))))


def read_by_h5py(path):
    with h5py.File(path) as file:
        check(json.loads(file["config"][()]) == {"hidden": 64, "name": "\u00fc"}, file["config"][()])
        weights = file["weights"]
        for name, dtype, shape in state_tensors():
            dataset = weights[name]
            raw = written(dtype, shape)
            label = dataset.attrs["dtype"]
            check((label.decode() if isinstance(label, bytes) else label) == dtype, f"{name}: {label}")
            if dtype in PACKED:
                check(dataset[...].tobytes() == raw and tuple(dataset.attrs["shape"]) == shape, name)
                continue
            check(dataset.shape == shape, f"{name}: {dataset.shape}")
            array = dataset[()]
            if dtype in NUMPY:
                check(array.tobytes() == raw and array.dtype == numpy.dtype(NUMPY[dtype]), f"{name}: {array.dtype}")
            elif dtype == "BF16":
                expected = (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
                check(array.dtype == "<f4" and same(numpy.asarray(array), expected), name)
            elif dtype == "F8_E5M2":
                expected = (numpy.frombuffer(raw, "u1").astype("<u2") << 8).view("<f2").reshape(shape)
                check(same(numpy.asarray(array).astype("f4"), expected.astype("f4")), name)
            else:
                check(array.dtype == "u1" and array.tobytes() == raw, name)


def tool(*command):
    """Returns the output of an HDF5 tool, which finds hdf5plugin's zstd."""
    plugins = {"HDF5_PLUGIN_PATH": hdf5plugin.PLUGIN_PATH}
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plugins})
    check(result.returncode == 0, f"{' '.join(command)}: exit status {result.returncode} {result.stdout} {result.stderr}")
    return result.stdout


def ours_again(path, prefix="weights/"):
    """Checks a copy that another tool made: it is not a state, but all of it can be read."""
    opened = subprocess.run([peer, "open", path], capture_output=True, text=True)
    check(opened.returncode == 2, f"{path} is taken for a state file: {opened.stdout}")
    found = listing(path)
    for name, dtype, shape in state_tensors():
        tensor = found["by_name"].get(prefix + name)
        check(tensor is not None, f"{name}: {found['words']}")
        check(tensor["dtype"] == dtype and tuple(tensor["shape"]) == shape, f"{name}: {tensor}")
        for piece in PIECES:
            with open(os.path.join(found["dump"], f"{tensor['number']}.{piece}"), "rb") as file:
                check(file.read() == written(dtype, shape), f"{name} in pieces of {piece}: other elements")
    return opened.stderr


def theirs_read_ours(folder, level):
    path = os.path.join(folder, f"state{len(level)}.h5")
    run("make", path, *level)
    check(run("open", path) == f"{len(list(state_tensors()))} tensors\n", "other tensors")
    read_by_h5py(path)
    if shutil.which("h5ls") is None:
        print("h5ls, h5dump, h5repack and h5diff are not installed: they were NOT tried", file=sys.stderr)
        return
    listed = tool("h5ls", "-r", path)
    for name, dtype, shape in state_tensors():
        if name.isascii() and dtype not in PACKED:
            extent = "SCALAR" if shape == () else ", ".join(map(str, shape))
            check(f"/weights/{name} " in listed and f"{{{extent}}}" in listed, f"h5ls has no {name}")
    check("DATASET" in tool("h5dump", "-H", path), "h5dump shows nothing")
    for name in ["model.layers.0.weight", "F32", "U16", "I64", "F8_E4M3"]:
        raw = os.path.join(folder, "raw")
        tool("h5dump", "-b", "LE", "-o", raw, "-d", "/weights/" + name, path)
        dtype, shape = next((d, s) for n, d, s in state_tensors() if n == name)
        with open(raw, "rb") as file:
            check(file.read() == written(dtype, shape), f"h5dump of {name}: other elements")
    # The list omits datasets without elements, because h5repack cannot filter them.
    some = ",".join("/weights/" + name for name in ["model.layers.0.weight", "BF16", "F64", "F4", "F8_E4M3", "C64"])
    for filters in [[], ["-f", some + ":SHUF", "-f", some + ":GZIP=1"]]:
        copy = os.path.join(folder, f"repacked{len(level)}{len(filters)}.h5")
        tool("h5repack", *filters, path, copy)
        # The catalogue, the config and all tensors are unchanged.
        tool("h5diff", path, copy)
        read_by_h5py(copy)
        words = ours_again(copy)
        check("corrupt: " in words and copy in words, words)
    print("a state file that h5repack copied:", words.strip())


with tempfile.TemporaryDirectory(prefix="muster-test-") as temporary:
    types(temporary)
    custom_floats(temporary)
    chunks(temporary)
    parts_of_chunks(temporary)
    compact(temporary)
    texts_and_refusals(temporary)
    theirs_read_ours(temporary, [])
    theirs_read_ours(temporary, ["1"])
print(f"{checks.count} checks with h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, hdf5plugin {hdf5plugin.version}, "
      f"numpy {numpy.__version__}")
