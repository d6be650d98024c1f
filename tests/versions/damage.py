#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damages versions and local copies in hundreds of ways. `muster pull` either refuses with one message that names version,
file and tensor, and leaves the local copy unchanged, or it gives the right bytes.

    damage.py --count 5000 --seed 7     a campaign; --only N repeats one case
"""

import json
import os
import random
import shutil

import peer
from support import Failed, Test, at_version, check, leftovers, same, snapshot

test = Test(__doc__, count=300)
t = test.folder
states = {0: peer.make_model(1)}
numbers = random.Random(2)
for i in range(1, 5):
    states[i] = peer.changed_model(states[i - 1], numbers, tensors=0.8)
base = peer.write_model(t / "base", states[0], files=2)
NEWEST = 4

# Two sources: one of the independent writer, without Muster's key in the index, and one of Muster.
theirs = peer.Writer(t / "theirs", states[0], files=3)
theirs.delta(states[1])
theirs.full(states[2], files=3)
theirs.delta(states[3], encoding="overwrite", files=2)
theirs.delta(states[4], checksum="adler32", sized=False)
for i in range(1, 5):
    folder = peer.write_model(t / "model", states[i], files=3)
    test.publish(folder, t / "ours", base, *[[], ["--full"], ["--encoding", "overwrite"], []][i - 1])
BOMB = peer.compress(bytes(1 << 27))
local = t / "places" / "local"
local.parent.mkdir()


class Case:
    """One version whose files a damage changes. `words`: the message must contain them."""

    def __init__(self, numbers, source, version):
        self.numbers, self.source, self.version = numbers, source, version
        self.folder = source / peer.version_name(version)
        self.words, self.must_refuse, self.other = [], True, None

    def data_files(self):
        return sorted(self.folder.glob("*.safetensors"))

    def pick(self, with_index=False):
        """Picks a file, which the message must name."""
        path = self.numbers.choice(self.data_files() + ([self.folder / peer.INDEX] if with_index else []))
        self.words.append(path.name)
        return path

    def index(self, change):
        path = self.folder / peer.INDEX
        index = json.loads(path.read_text())
        changed = change(index)
        path.write_text(json.dumps(index if changed is None else changed))
        self.words.append(peer.INDEX)

    def header(self, change, name_file=True):
        """change(header, name, entry): `name` is a random tensor of a random file."""
        path = self.pick() if name_file else self.numbers.choice(self.data_files())
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        name = self.numbers.choice([key for key in header if key != "__metadata__"])
        changed = change(header, name, header[name])
        text = (changed if isinstance(changed, str) else json.dumps(header)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
        return name

    def content(self, change):
        """change(frame, size of the tensor, sums, name) returns another frame. The message must name the tensor."""
        path = self.pick()
        sums, tensors = peer.read_safetensors(path)
        name = self.numbers.choice([key for key, tensor in tensors.items() if tensor.data])
        frame = change(tensors[name].data, len(states[0][name].data), sums, name)
        tensors[name] = peer.Tensor("U8", (len(frame),), frame)
        path.write_bytes(peer.safetensors_bytes(tensors, sums))
        self.drop_own_key()
        self.words.append(name)

    def drop_own_key(self):
        """Muster's own key has a checksum of each file, which would be noticed first."""
        index = json.loads((self.folder / peer.INDEX).read_text())
        index["metadata"].pop("muster", None)
        (self.folder / peer.INDEX).write_text(json.dumps(index))

    @property
    def is_delta(self):
        return self.version != 2

    def encoding(self):
        return json.loads((self.folder / peer.INDEX).read_text())["metadata"].get("delta_encoding")


# ---- damages of files ----


def flip(case):
    path = case.pick(True)
    data = bytearray(path.read_bytes())
    # A flipped bit can have no effect. That of an index or of a full version without checksums can have a valid effect.
    case.must_refuse = False
    data[case.numbers.randrange(len(data))] ^= 1 << case.numbers.randrange(8)
    path.write_bytes(data)
    case.other = "any" if not case.is_delta or path.name == peer.INDEX else None
    case.words = [] if path.name != peer.INDEX else case.words


def truncate(case):
    path = case.pick(True)
    os.truncate(path, case.numbers.randrange(path.stat().st_size))


def extend(case):
    path = case.pick()
    with open(path, "ab") as file:
        file.write(case.numbers.randbytes(case.numbers.randrange(1, 100)))


def zeros(case):
    path = case.pick(True)
    data = bytearray(path.read_bytes())
    at = case.numbers.randrange(len(data))
    size = case.numbers.randrange(1, 4096)
    data[at:at + size] = bytes(len(data[at:at + size]))
    case.other = "any" if not case.is_delta else None
    case.must_refuse = path.name == peer.INDEX and case.is_delta
    path.write_bytes(data)
    case.words = []


def remove(case):
    path = case.pick(True)
    # Without an index the version is unfinished.
    path.unlink()
    case.words = case.words if path.name != peer.INDEX else []


def rename(case):
    path = case.pick()
    path.rename(path.with_name(case.numbers.choice(["x.safetensors", path.name + ".tmp", "model-00009-of-00010.safetensors"])))


def swap(case):
    paths = case.data_files()
    if len(paths) < 2:
        return remove(case)
    one, two = case.numbers.sample(paths, 2)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    return None


def from_another_version(case):
    other = case.source / peer.version_name(case.numbers.choice([n for n in (1, 2, 3, 4) if n != case.version]))
    case.pick().write_bytes(case.numbers.choice(sorted(other.glob("*.safetensors"))).read_bytes())
    case.words = []


def special(case):
    path = case.pick(True)
    data = path.read_bytes()
    path.unlink()
    kind = case.numbers.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to("/dev/zero")
    else:
        # A link to the right bytes outside the version: either answer is right.
        (case.source / "elsewhere").write_bytes(data)
        path.symlink_to(case.source / "elsewhere")
        case.must_refuse = False
    case.words = []


def unnamed_files(case):
    # Files that no index names have no effect.
    shutil.copy(case.numbers.choice(case.data_files()), case.folder / "model-00099-of-00100.safetensors")
    (case.folder / "notes.txt").write_text("x")
    (case.folder / "more.tmp").write_bytes(b"x")
    case.must_refuse, case.other = False, None


# ---- damages of indexes ----

WRONG = [None, 3, -1, "", "x", "000009", "-00001", [], {}, True, 1e300, "0" * 5000, "\u0000", "٣"]


def metadata_value(case):
    key = case.numbers.choice(["version", "base_version", "delta_encoding", "compression_format", "checksum_format"])

    def change(index):
        if not case.is_delta:
            index["metadata"][case.numbers.choice(["version", "total_size"])] = case.numbers.choice(WRONG)
            case.must_refuse, case.other = False, "states"
            return
        words = WRONG + (["xor2", "XOR"] if key == "delta_encoding" else ["gzip", "zstd:3"] if key == "compression_format" else ["md5", "crc32"])
        index["metadata"][key] = case.numbers.choice([word for word in words if word != index["metadata"].get(key)])
    case.index(change)


def metadata_key(case):
    def change(index):
        key = case.numbers.choice(sorted(index["metadata"]))
        del index["metadata"][key]
        # Without its encoding a delta is a full version of the format, of which Muster's key may know better.
        if key in ("muster", "total_size") or not case.is_delta:
            case.must_refuse = False
        elif key == "delta_encoding":
            case.must_refuse, case.other = False, "as a full version"
    case.index(change)


def wrong_base(case):
    if not case.is_delta:
        return metadata_value(case)
    return case.index(lambda index: index["metadata"].update(base_version=f"{case.numbers.choice([0, case.version, case.version + 1, 7]) if case.version != 1 else 5:06d}"))


def path_as_name(case):
    def change(index):
        name = case.numbers.choice(sorted(index["weight_map"]))
        wanted = index["weight_map"][name]
        path = case.numbers.choice([f"../{case.folder.name}/{wanted}", str(case.folder / wanted), f"./{wanted}", f"x/../{wanted}", "", ".", "..", "../../base/config.json",
                                    f"{wanted}\u0000", "/dev/zero", "\n", "config.json", 5, None, [wanted]])
        for key, file in index["weight_map"].items():
            if file == wanted or key == name:
                index["weight_map"][key] = path
    case.index(change)


def weight_map(case):
    kind = case.numbers.randrange(5)

    def change(index):
        entries = index["weight_map"]
        name = case.numbers.choice(sorted(entries))
        if kind == 0:
            del entries[name]
        elif kind == 1:
            entries["no.such.tensor"] = entries[name]
        elif kind == 2:
            entries[name] = "model-00077-of-00078.safetensors"
        elif kind == 3:
            index["weight_map"] = case.numbers.choice([None, [], "x", 1, [[name, entries[name]]]])
        else:
            del index["weight_map"]
    case.index(change)
    case.words = []


def bad_json(case):
    path = case.folder / peer.INDEX
    text = path.read_bytes()
    path.write_bytes(case.numbers.choice([
        b"", b"null", b"[]", b"{}", b"3", text[:-1], text + b"x", b"\xef\xbb\xbf" + text[:-5], b"\xff\xfe" + text, b"[" * 100000,
        text.replace(b'"weight_map"', b'"weight_map": {}, "x"', 1), text.replace(b'{"metadata"', b'{"metadata": NaN, "y"', 1),
        b"\x00" * len(text), b'{"metadata": {"delta_encoding": "xor"}}']))
    case.must_refuse, case.other = False, "any"
    if case.is_delta:
        case.other = "as a full version"


def twice(case):
    paths = case.data_files()
    one = case.numbers.choice(paths)
    sums, tensors = peer.read_safetensors(one)
    name = case.numbers.choice(sorted(tensors))
    other = case.numbers.choice([path for path in paths if path != one] or [case.folder / "model-00001-of-00002.safetensors"])
    if not other.exists():
        # The second file exists only here, and the index names it for the same tensor.
        other.write_bytes(peer.safetensors_bytes({name: tensors[name], "x.y": peer.Tensor("U8", (0,), b"")}, {name: sums.get(name, ""), "x.y": ""}))
        case.index(lambda index: index["weight_map"].update({"x.y": other.name}))
    else:
        other_sums, other_tensors = peer.read_safetensors(other)
        other_tensors[name] = tensors[name]
        other.write_bytes(peer.safetensors_bytes(other_tensors, {**other_sums, name: sums.get(name, "")}))
    case.drop_own_key()
    case.words = []


def muster_key(case):
    def change(index):
        text = index["metadata"].get("muster")
        case.must_refuse, case.other = False, "states"
        if text is None:
            index["metadata"]["muster"] = case.numbers.choice(["", "x", "{}", "[]", "null", 3, {}])
            return
        at = case.numbers.randrange(len(text))
        index["metadata"]["muster"] = case.numbers.choice([
            text[:at], text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1:], "{}", "", "null", 5, text + text,
            "{" * 10000, text.replace("1", "2"), text.replace("a", "b")])
    case.index(change)


# ---- damages of headers ----


def header_length(case):
    path = case.pick()
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    wrong = case.numbers.choice([0, 1, length - 1, length + 1, len(data), len(data) - 8, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    path.write_bytes(wrong.to_bytes(8, "little") + data[8:])


def offsets(case):
    def change(header, name, entry):
        first, last = entry["data_offsets"]
        entry["data_offsets"] = case.numbers.choice([
            [first, last + 1], [first + 1, last], [last, first], [-1, last], [first, 1 << 62], [first, (1 << 64) - 1], [0, 0], [first], [], None, "x",
            [first, last, last], [first + 0.5, last], [1 << 63, (1 << 63) + last - first]])
        if entry["data_offsets"] == [first, last] or first == last:
            entry["data_offsets"] = None
    case.header(change)


def dtype_or_shape(case):
    def change(header, name, entry):
        if case.numbers.randrange(2):
            entry["dtype"] = case.numbers.choice([word for word in ["F32", "BF16", "I8", "X9", "", None, 3] if word != entry["dtype"]])
        else:
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            entry["shape"] = case.numbers.choice([[size + 1], [-1], [1, size], [size, 1], [1 << 62, 4], None, "x", [], [[size]], [0.5]])
        if not case.is_delta:
            case.must_refuse, case.other = False, "any"
        elif entry["shape"] == [] and size == 1:
            entry["shape"] = None
    name = case.header(change)
    if case.is_delta:
        del name


def checksum_words(case):
    if not case.is_delta:
        return truncate(case)

    def change(header, name, entry):
        sums = header["__metadata__"]
        value = sums[name]
        kind = case.numbers.randrange(7)
        if kind == 0:
            del sums[name]
        elif kind == 1:
            del header["__metadata__"]
        elif kind == 6:
            sums["no.such.tensor"] = value
            case.must_refuse = False
        else:
            sums[name] = [value[:-1], "", f"{int(value, 16) ^ 1:0{len(value)}x}", value + "0", "g" * len(value)][kind - 1]
        if kind not in (1, 6):
            case.words.append(name)
        if kind == 3:
            # If the next version changes the tensor too, its checksum is the one that counts.
            case.must_refuse = case.version == NEWEST
    case.header(change)
    case.drop_own_key()
    return None


def tensor_name(case):
    def change(header, name, entry):
        header["no.such.tensor"] = header.pop(name)
        if name in header.get("__metadata__", {}):
            header["__metadata__"]["no.such.tensor"] = header["__metadata__"].pop(name)
    case.header(change, name_file=False)


def unknown_tensor(case):
    """A tensor that the base lacks; index and file agree."""
    if not case.is_delta:
        return tensor_name(case)

    def change(header, name, entry):
        header["no.such.tensor"] = header.pop(name)
        header["__metadata__"]["no.such.tensor"] = header["__metadata__"].pop(name)
        change.name = name
    case.header(change, name_file=False)

    def rename_in_index(index):
        index["weight_map"]["no.such.tensor"] = index["weight_map"].pop(change.name)
        index["metadata"].pop("muster", None)
    case.index(rename_in_index)
    case.words = ["no.such.tensor"]
    return None


def header_json(case):
    def change(header, name, entry):
        text = json.dumps(header)
        return case.numbers.choice([text[:-1], "[]", "null", "", "{}", text + "x", text[:-1] + f', {json.dumps(name)}: {json.dumps(entry)}}}', "[" * 100000])
    case.header(change)


# ---- damages of frames, with a file that is otherwise valid ----


def not_a_frame(case):
    if not case.is_delta:
        return truncate(case)

    def change(frame, size, sums, name):
        kind = case.numbers.randrange(9)
        case.must_refuse = kind not in (7, 8)
        return [b"", frame[:-1], case.numbers.randbytes(len(frame)), b"\x00" + frame[1:], frame[:4] + b"\xff" + frame[5:], frame[:len(frame) // 2],
                (0x184D2A50).to_bytes(4, "little") + (1 << 31).to_bytes(4, "little") + frame,
                # A skippable frame, or more bytes after the frame: a reader may refuse these or read the frame.
                (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc" + frame, frame + frame][kind]
    return case.content(change)


def bomb(case):
    if not case.is_delta:
        return truncate(case)

    def change(frame, size, sums, name):
        huge = peer.compress(bytes(8 * size + 64), sized=False)
        # Magic, a descriptor with an 8-byte content size and a single segment, 1 PiB, a run of zeros.
        claims = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + (3 | (1 << 3)).to_bytes(3, "little") + b"\x00"
        # A window of 2^41 bytes.
        window = b"\x28\xb5\x2f\xfd\x00" + bytes([31 << 3]) + (3 | (1 << 3)).to_bytes(3, "little") + b"\x00"
        dictionary = b"\x28\xb5\x2f\xfd\x01\x50\x05" + (3 | (1 << 3)).to_bytes(3, "little") + b"\x00"
        return case.numbers.choice([BOMB, huge, claims, window, dictionary])
    return case.content(change)


def changed_content(case):
    """A valid frame with another content. The checksum is that of the tensor if the content were right."""
    if not case.is_delta:
        return truncate(case)
    encoding = case.encoding()

    def change(frame, size, sums, name):
        content = bytearray(peer.decompress(frame, 1 << 30))
        if encoding == "xor":
            kind = case.numbers.randrange(4)
            if kind == 0:
                content = content[:-1]
            elif kind == 1:
                content += b"\x00"
            elif kind == 2:
                content = bytearray()
            else:
                content[case.numbers.randrange(len(content))] ^= 1
            return peer.compress(content, sized=bool(case.numbers.randrange(2)))
        count = int.from_bytes(content[:4], "little")
        positions = [int.from_bytes(content[4 + 4 * i:8 + 4 * i], "little") for i in range(count)]
        values = list(content[4 + 4 * count:])
        i = case.numbers.randrange(count)
        kind = case.numbers.randrange(12)
        if kind == 0:
            positions[-1] = size
        elif kind == 1:
            positions[i] = (1 << 32) - 1
        elif kind == 2:
            positions.reverse()
            values.reverse()
            case.must_refuse = False
        elif kind == 3:
            positions.insert(i, positions[i])
            values.insert(i, values[i])
            case.must_refuse = False
        elif kind == 4:
            values[i] ^= 255
        elif kind == 5:
            values.append(0)
        elif kind == 6:
            values.pop()
        elif kind == 7:
            return peer.compress((1 << 31).to_bytes(4, "little") + content[4:])
        elif kind == 8:
            return peer.compress((count + 1).to_bytes(4, "little") + content[4:])
        elif kind == 9:
            return peer.compress(content[:case.numbers.randrange(4)])
        elif kind == 10:
            positions.pop()
            values.pop()
        else:
            return peer.compress((0).to_bytes(4, "little"))
        return peer.compress(peer.overwriting(positions, values))
    return case.content(change)


def another_xor(case):
    """Content and checksum agree with each other, but they belong to another tensor."""
    if not case.is_delta:
        return swap(case)

    def change(frame, size, sums, name):
        sums[name] = peer.CHECKSUMS["adler32" if len(sums[name]) == 8 else "xxh3-128"](bytes(size))
        # If the next version changes the tensor too, its checksum is the one that counts.
        case.must_refuse = case.version == NEWEST
        return frame
    return case.content(change)


# ---- damages of the chain ----


def missing_version(case):
    case.other = None
    kind = case.numbers.randrange(5)
    if kind == 0:
        shutil.rmtree(case.folder)
    elif kind == 1:
        shutil.rmtree(case.folder)
        case.folder.write_text("x")
    elif kind == 2:
        case.folder.rename(case.source / (case.folder.name + ".partial-0123456789abcdef@1-1-1"))
    elif kind == 3:
        for path in case.folder.iterdir():
            path.unlink()
    else:
        case.folder.rename(case.source / "elsewhere")
        case.folder.symlink_to(case.source / "elsewhere")
        case.must_refuse = False
    # Without version 2, which is full, the chain may begin at the base.
    if case.version == 2:
        case.must_refuse = case.must_refuse and kind == 9


def version_twice(case):
    other = case.numbers.choice([n for n in (1, 2, 3, 4) if n != case.version])
    shutil.rmtree(case.folder)
    shutil.copytree(case.source / peer.version_name(other), case.folder)
    if other == 2 or case.version == 2:
        case.must_refuse, case.other = False, "any"


def names_beside(case):
    for name in ("weight_v5", "weight_v0000005", "weight_v00000x", "weight_v000009.tmp", "weight_v000010.partial-0123456789abcdef@1-1-1", "latest", "weight_v-00001"):
        (case.source / name).mkdir(exist_ok=True)
    case.must_refuse = False


DAMAGES = [flip, flip, truncate, extend, zeros, remove, rename, swap, from_another_version, special, unnamed_files, metadata_value, metadata_value,
           metadata_key, wrong_base, path_as_name, path_as_name, weight_map, bad_json, twice, muster_key, muster_key, header_length, offsets, offsets,
           dtype_or_shape, checksum_words, tensor_name, unknown_tensor, header_json, not_a_frame, not_a_frame, bomb, changed_content, changed_content,
           changed_content, another_xor, missing_version, version_twice, names_beside]

# ---- damages of the local copy, with a source that is whole ----


def local_damage(numbers):
    record, state = local / ".weight_sync" / "muster.json", local / ".weight_sync" / "state.json"
    # The record covers the weights, so a changed config.json stays.
    path = numbers.choice([record, state, record, *sorted(local.glob("*.safetensors")), local / peer.INDEX])
    data = path.read_bytes() if path.exists() else b""
    kind = numbers.choice(["flip", "truncate", "delete", "extend", "empty", "garbage", "zeros", "extra", "another marker"])
    if kind == "extra" or not data:
        (local / "extra.safetensors").write_bytes(peer.safetensors_bytes({"x": peer.Tensor("U8", (1,), b"x")}))
    elif kind == "another marker":
        path = state
        peer.set_marker(local, numbers.choice([0, 1, 2, 3, 4, 77]))
    elif kind == "delete":
        path.unlink()
    else:
        at = numbers.randrange(len(data))
        path.write_bytes({"flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1:], "truncate": data[:at], "extend": data + b"x", "empty": b"",
                          "garbage": numbers.randbytes(50), "zeros": bytes(len(data))}[kind])
    return f"{kind} {path.relative_to(local)}"


def run_local(i, numbers):
    shutil.rmtree(local, ignore_errors=True)
    source = t / ("theirs", "ours")[i % 2]
    test.pull(source, local, base, "--version", numbers.choice([1, 2, 3]))
    what = local_damage(numbers)
    before = snapshot(local)
    result = test.run("pull", source, local, "--base", base, "--wait", "0s")
    try:
        if result.status == 0:
            # A file that does not belong to the version may stay or not, but it would be loaded.
            check(at_version(local, states) == NEWEST, "not the newest version")
            return 0
        test.is_refusal(result)
        check(snapshot(local) == before, "the copy changed")
        return 1
    except (Failed, peer.Refused, OSError, ValueError) as error:
        raise Failed(f"{what}: {error}; {result}") from error


def run(i, numbers):
    with_local = i % 2 == 0
    start = 2 if with_local else None
    name = ("theirs", "ours")[i // 2 % 2]
    source = t / "damaged"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(t / name, source)
    local = t / "places" / (name if with_local else "fresh")
    if not with_local:
        shutil.rmtree(local, ignore_errors=True)
    elif peer.marker(local) != 2:
        # Version 2 is older than all damaged versions, and the copy has a record.
        test.pull(t / name, local, base, "--version", 2)
    case = Case(numbers, source, numbers.choice([3, 4] if with_local else [2, 3, 4]))
    damage = DAMAGES[i // 4 % len(DAMAGES)]
    damage(case)
    before = snapshot(local)
    result = test.run("pull", source, local, "--base", base, "--version", NEWEST, "--wait", "0s", limit=120)
    what = f"{damage.__name__} of version {case.version} of {name}, local {start}"
    try:
        check(leftovers(local.parent) == [], f"leftovers: {leftovers(local.parent)}")
        if result.status != 0:
            test.is_refusal(result)
            check(snapshot(local) == before, "the copy changed")
            # The reader applies all deltas of a tensor at once, so the last checksum may be the first that differs.
            later = NEWEST if "the version states" in result.err or case.other in ("as a full version", "any") else case.version
            check(damage in (version_twice, missing_version) or case.version == 2 or any(f"version {n}" in result.err or peer.version_name(n) in result.err for n in range(case.version, later + 1)),
                  f"the message does not name version {case.version}")
            if case.must_refuse:
                for word in case.words[-1:] if later != case.version else case.words:
                    check(word in result.err or json.dumps(word, ensure_ascii=False)[1:-1] in result.err, f"the message does not name {word}")
            return 1
        check(not case.must_refuse, "it was pulled")
        check(peer.marker(local) == NEWEST, f"the marker is {peer.marker(local)}")
        if case.other == "any":
            # The damage is a valid version with other bytes, which only the format's own checksums could notice.
            return 0
        if case.other == "as a full version" and peer.read_model(local) != states[NEWEST]:
            print(f"  note: {what}: taken for a full version")
            return 0
        same(peer.read_model(local), states[NEWEST])
        return 0
    except (Failed, peer.Refused, OSError, ValueError) as error:
        raise Failed(f"{what}: {error}; {result}") from error


with test.part("damaged versions"):
    results = test.cases("damage", run)
    print(f"  {len(results)} cases, {sum(results)} refused, {len(results) - sum(results)} pulled with the right bytes")
with test.part("damaged copies"):
    results = test.cases("copy", run_local, max(40, test.options.count // 5))
    print(f"  {len(results)} cases, {sum(results)} refused, {len(results) - sum(results)} pulled with the right bytes")
test.finish()
