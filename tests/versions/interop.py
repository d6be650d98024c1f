#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Versions that Muster publishes are read by the independent reader, and the other way round, with equal bytes."""

import json
import random
import shutil

import peer
from support import Test, at_version, check, leftovers, same, snapshot, versions_in

test = Test(__doc__)
t = test.folder
models = {0: peer.make_model(1)}
base = peer.write_model(t / "base", models[0], files=3)
(t / "again").mkdir()


def chain(length, seed):
    """Returns {number: model} of a chain from the base. Version 2 changes nothing."""
    numbers, result = random.Random(seed), {0: models[0]}
    for i in range(1, length + 1):
        result[i] = result[i - 1] if i == 2 else peer.changed_model(result[i - 1], numbers)
    return result


def read_by_both(source, states, name, step=1):
    """Both readers go through the chain with one local copy each; a fresh one starts at the end."""
    for number in range(1, max(states) + 1, step):
        peer.pull(t / name / "theirs", base, source, number)
        at_version(t / name / "theirs", states)
        test.pull(source, t / name / "ours", base, "--version", number)
        check(at_version(t / name / "ours", states) == number, f"not at version {number}")
    test.pull(source, t / name / "fresh", base)
    check(at_version(t / name / "fresh", states) == max(states), "not the newest version")
    peer.pull(t / name / "theirs2", base, source, max(states))
    at_version(t / name / "theirs2", states)
    check(leftovers(t / name) == [], f"leftovers: {leftovers(t / name)}")


# ---- Muster's versions ----
for encoding in ("xor", "overwrite"):
    with test.part(f"publish {encoding}"):
        states, source = chain(10, encoding), t / encoding / "source"
        for number in range(1, 11):
            folder = peer.write_model(t / encoding / "model", states[number], files=1 + number % 3)
            test.publish(folder, source, base, "--encoding", encoding)
            changed = sum(states[number][name] != states[number - 1][name] for name in states[0])
            count = peer.check_delta(source / peer.version_name(number), number)
            check(count == changed, f"version {number}: {count} tensors, and {changed} changed")
            shutil.rmtree(folder)
        check(versions_in(source) == list(range(1, 11)) and leftovers(source) == [], "other names in the source")
        read_by_both(source, states, encoding, 3)

with test.part("publish full versions"):
    states, source = chain(6, "full"), t / "full" / "source"
    # From version 3 on, one tensor has another shape and one is new, so that version is full.
    shapes = {**peer.SHAPES, "model.norm.weight": ("F32", (15,)), "model.new": ("BF16", (3, 3))}
    states[3] = peer.make_model(3, shapes)
    for number, more in [(4, []), (5, ["--full"]), (6, [])]:
        states[number] = peer.changed_model(states[number - 1], random.Random(number))
    for number in range(1, 7):
        folder = peer.write_model(t / "full" / "model", states[number], files=2)
        test.publish(folder, source, base, *(["--full"] if number == 5 else []))
        index = json.loads((source / peer.version_name(number) / peer.INDEX).read_text())
        check(("delta_encoding" in index["metadata"]) == (number not in (3, 5)), f"version {number} is of another kind")
        if number in (3, 5):
            check(index["metadata"]["version"] == f"{number:06d}", "a full version without its number")
            same(peer.read_model(source / peer.version_name(number)), states[number])
        shutil.rmtree(folder)
    read_by_both(source, states, "full")

with test.part("publish --full-every"):
    states, source = chain(5, "every"), t / "every" / "source"
    for number in range(1, 6):
        test.publish(peer.write_model(t / "every" / "model", states[number]), source, base, "--full-every", 3)
    kinds = [peer.is_delta(source / peer.version_name(number)) for number in range(1, 6)]
    check(kinds.count(False) in (1, 2), f"other kinds: {kinds}")
    read_by_both(source, states, "every")

with test.part("publish --base-copy, --version, --keep"):
    states, source = chain(5, "copy"), t / "copy" / "source"
    for number in range(1, 6):
        folder = peer.write_model(t / "copy" / "model", states[number])
        test.refused("publish", folder, source, "--base", base, "--version", number + 1, mentions=[str(number)])
        test.publish(folder, source, base, "--base-copy", t / "copy" / "previous", "--version", number)
        peer.check_delta(source / peer.version_name(number), number)
    read_by_both(source, states, "copy")
    test.publish(folder, source, base, "--full")
    states[6] = states[5]
    test.publish(folder, source, base, "--keep", 1, "--keep-for", "0s")
    states[7] = states[5]
    check(versions_in(source) == [6, 7], f"kept: {versions_in(source)}")
    test.pull(source, t / "copy" / "ours", base)
    at_version(t / "copy" / "ours", states)

with test.part("a tied lm_head that the base lacks"):
    states, source = chain(2, "tied"), t / "tied" / "source"
    lacking = peer.write_model(t / "tied" / "base", {name: tensor for name, tensor in models[0].items() if name != "lm_head.weight"})
    for number in (1, 2):
        tied = {**states[number], "lm_head.weight": states[number]["model.embed_tokens.weight"]}
        test.publish(peer.write_model(t / "tied" / "model", tied), source, lacking)
        peer.check_delta(source / peer.version_name(number), number)
        expected = {number: {name: tensor for name, tensor in tied.items() if name != "lm_head.weight"}}
        for reader, local in ((peer.pull, t / "tied" / "theirs"), (lambda *words: test.pull(source, words[0], lacking), t / "tied" / "ours")):
            reader(local, lacking, source, number)
            at_version(local, expected)

# ---- versions of the independent writer ----
STYLES = {
    "xor": {}, "xor, adler32": {"checksum": "adler32"}, "xor, unsized frames": {"sized": False},
    "xor, several files": {"files": 4}, "overwrite": {"encoding": "overwrite"},
    "overwrite, adler32, several files": {"encoding": "overwrite", "checksum": "adler32", "files": 3},
    "overwrite, unsized frames": {"encoding": "overwrite", "sized": False},
    "further keys of the metadata": {"metadata": {"run": "a", "total_size": 12, "nested": {"b": [1]}}},
    "unpadded headers, level 9, frames with checksums": {"padded": False, "level": 9, "frame": True},
}
for i, (name, style) in enumerate(STYLES.items()):
    with test.part(f"pull {name}"):
        states, folder = chain(5, name), t / f"style{i}"
        writer = peer.Writer(folder / "source", models[0], **style)
        for number in range(1, 6):
            # Only the first deltas count for Muster's reader when a full version follows.
            if i % 2 == 1 and number == 4:
                writer.full(states[number], files=1 + i % 3, metadata={"version": f"{number:06d}"} if i % 4 == 1 else None)
            else:
                writer.delta(states[number])
        if style.get("encoding") == "overwrite" and not style.get("sized", True):
            test.pull(folder / "source", folder / "ours", base)
            at_version(folder / "ours", states)
        else:
            read_by_both(folder / "source", states, f"style{i}", 2)

with test.part("encodings and checksums that change within a chain"):
    states, folder = chain(10, "mixed"), t / "mixed"
    writer = peer.Writer(folder / "source", models[0])
    for number in range(1, 11):
        writer.delta(states[number], **list(STYLES.values())[number % 6])
    read_by_both(folder / "source", states, "mixed", 4)

with test.part("an overwrite delta that lists a byte which keeps its value"):
    # A writer may list more positions than necessary; only the checksum decides.
    folder, name = t / "idle", "model.bytes"
    writer = peer.Writer(folder / "source", models[0], encoding="overwrite")
    states = chain(1, "idle")
    version = writer.delta(states[1])
    path = next(version.glob("*.safetensors"))
    sums, tensors = peer.read_safetensors(path)
    frame = peer.compress(peer.overwriting(range(100), states[1][name].data[:100]))
    tensors[name], sums[name] = peer.Tensor("U8", (len(frame),), frame), peer.xxh3_128(states[1][name].data[:100] + models[0][name].data[100:])
    path.write_bytes(peer.safetensors_bytes(tensors, sums))
    index = json.loads((version / peer.INDEX).read_text())
    index["weight_map"][name] = path.name
    (version / peer.INDEX).write_text(json.dumps(index))
    states[1][name] = models[0][name]._replace(data=states[1][name].data[:100] + models[0][name].data[100:])
    read_by_both(folder / "source", states, "idle")

# ---- further rules of a pull ----
with test.part("an older version, the base, the same version again"):
    source, local = t / "mixed" / "source", t / "again" / "local"
    states = chain(10, "mixed")
    for number in (7, 3, 0, 10, 10):
        inode_before = local.stat().st_ino if local.exists() else 0
        test.pull(source, local, base, "--version", number)
        check(at_version(local, states) == number, f"not at version {number}")
    check(local.stat().st_ino == inode_before, "a pull of the same version built the copy again")

with test.part("a local copy of the independent reader, without a record"):
    local = t / "again" / "foreign"
    peer.pull(local, base, source, 4)
    test.pull(source, local, base, "--version", 6)
    check(at_version(local, states) == 6, "not at version 6")
    peer.pull(local, base, source, 8)
    at_version(local, states)
    test.pull(source, local, base, "--version", 9)
    check(at_version(local, states) == 9, "not at version 9")

with test.part("a marker that is ahead of the bytes, and one that is behind them"):
    # A reader that was killed between its steps leaves both.
    for marked, bytes_of in ((6, 5), (5, 6)):
        local = t / "again" / f"torn{marked}"
        peer.pull(local, base, source, bytes_of)
        peer.set_marker(local, marked)
        test.pull(source, local, base, "--version", 8)
        check(at_version(local, states) == 8, "not at version 8")

with test.part("refused arguments"):
    local = t / "again" / "local"
    before = snapshot(local)
    test.refused("pull", source, local, "--base", base, "--version", 99, mentions=["99"], limit=90)
    test.refused("pull", source, base, "--base", base, mentions=["base"])
    test.refused("pull", t / "nowhere", local, "--base", base, mentions=["nowhere"])
    test.refused("pull", source, local, "--base", t / "nowhere", "--version", 0, mentions=["nowhere"])
    test.refused("publish", t / "nowhere", source, "--base", base, mentions=["nowhere"])
    check(snapshot(local) == before, "a refused command changed the local copy")

if "peer.py" not in test.options.program:
    with test.part("log"):
        for more in ([], ["--verify"], ["--local", local]):
            out = test.ok("log", source, "--base", base, *more).out
            check(all(str(number) in out for number in range(1, 11)), out)
            json.loads(test.ok("log", source, "--base", base, "--json", *more).out)

test.finish()
