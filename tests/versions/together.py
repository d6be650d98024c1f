#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several processes at once: publishers of the same version, pullers of one host, retention while readers pull, and
readers whose listings and files are stale, like those of a network file system (MUSTER_FAULTY_FS).
"""

import random
import shutil
import threading
import time
from pathlib import Path

import peer
from support import Test, at_version, check, leftovers, same, snapshot, versions_in

test = Test(__doc__, count=8, pullers=20)
t = test.folder
states = {0: peer.make_model(1, {**peer.SHAPES, "model.large": ("BF16", (700, 501))})}
numbers = random.Random(2)
for i in range(1, 13):
    states[i] = peer.changed_model(states[i - 1], numbers)
base = peer.write_model(t / "base", states[0], files=3)
folders = {i: peer.write_model(t / f"model{i}", states[i], files=2) for i in states}
source = t / "source"
for i in range(1, 7):
    test.publish(folders[i], source, base)


def copied(count, name):
    folder = t / name
    shutil.rmtree(folder, ignore_errors=True)
    for i in range(1, count + 1):
        shutil.copytree(source / peer.version_name(i), folder / peer.version_name(i))
    return folder


def two_publishers(i, numbers):
    folder = copied(2, "raced")
    # They publish other bytes, so that a mix would be noticed.
    models = [peer.changed_model(states[2], numbers) for _ in range(2)]
    written = [peer.write_model(t / f"raced{k}", models[k]) for k in range(2)]
    processes = []
    for k in range(2):
        processes.append(test.start("publish", written[k], folder, "--base", base, "--version", 3, *([["--full"], []][i % 2])))
        time.sleep(numbers.uniform(0, 0.01))
    results = [test.end(process) for process in processes]
    check(sorted(result.status for result in results) == [0, 2], [str(result) for result in results])
    winner = [result.status for result in results].index(0)
    test.is_refusal(results[1 - winner])
    check("version 3" in results[1 - winner].err or "weight_v000003" in results[1 - winner].err, results[1 - winner])
    check(versions_in(folder) == [1, 2, 3] and leftovers(folder) == [], f"{versions_in(folder)} {leftovers(folder)}")
    shutil.rmtree(t / "judge", ignore_errors=True)
    peer.pull(t / "judge", base, folder, 3)
    same(peer.read_model(t / "judge"), models[winner])
    return "exists" in results[1 - winner].err


def many_pullers(i, numbers):
    places = t / "places"
    local = places / "local"
    if i % 2 == 0:
        shutil.rmtree(places, ignore_errors=True)
        places.mkdir()
    old = peer.marker(local)
    new = numbers.choice([n for n in (2, 4, 6) if n != old])
    seen, stop = set(), threading.Event()

    def watch():
        # A reader that opens the copy by its name at any moment finds one whole version.
        while not stop.is_set():
            try:
                seen.add((peer.marker(local), local.stat().st_ino))
            except (OSError, ValueError):
                pass
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    processes = [test.start("pull", source, local, "--base", base, "--version", new, "--json") for _ in range(test.options.pullers)]
    results = [test.end(process) for process in processes]
    stop.set()
    watcher.join()
    check(all(result.status == 0 for result in results), [str(result) for result in results if result.status][:2])
    check(at_version(local, states) == new, f"not at version {new}")
    check({marker for marker, _ in seen} <= {old, new, None}, f"markers: {seen}")
    new_copies = {inode for marker, inode in seen | {(new, local.stat().st_ino)} if marker == new}
    check(len(new_copies) == 1, f"{len(new_copies)} copies were built")
    check(leftovers(places) == [], f"leftovers: {leftovers(places)}")


def retention():
    """A publisher deletes old versions while three readers pull the newest."""
    folder, newest = t / "kept", [0]
    results, stop = [], threading.Event()

    def read(k):
        local = t / f"reader{k}" / "local"
        local.parent.mkdir(exist_ok=True)
        until = time.monotonic() + 120
        while (not stop.is_set() or peer.marker(local) != newest[0]) and time.monotonic() < until:
            before = newest[0]
            result = test.run("pull", folder, local, "--base", base, "--wait", "20s")
            try:
                check(result.status == 0, result)
                at = at_version(local, states)
                check(at >= before, f"version {at}, although {before} existed before the pull")
                results.append(at)
            except Exception as error:
                results.append(error)
                return

    test.publish(folders[1], folder, base, "--full")
    newest[0] = 1
    readers = [threading.Thread(target=read, args=(k,)) for k in range(3)]
    for reader in readers:
        reader.start()
    try:
        for i in range(2, 13):
            more = ["--full"] if i % 3 == 1 else []
            test.publish(folders[i], folder, base, "--keep", 1, "--keep-for", "0s", *more)
            newest[0] = i
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    errors = [result for result in results if isinstance(result, Exception)]
    check(not errors, f"{len(errors)} readers failed: {errors[0] if errors else ''}")
    check(versions_in(folder)[0] >= 9 and leftovers(folder) == [], f"kept: {versions_in(folder)}, {leftovers(folder)}")
    print(f"  {len(results)} pulls of {len(set(results))} versions")


def stale_reader():
    rules = {"listings": ["listing=400"], "names": ["late=400"], "missing names": ["absent=400"], "bytes": ["old=400"],
             "lengths": ["short=400"], "all": ["listing=300", "late=200", "absent=200", "short=250"]}
    for name, rule in rules.items():
        backing = t / "server"
        shutil.rmtree(backing, ignore_errors=True)
        backing.mkdir()
        point = test.mount(backing, *rule)
        if point is None:
            print("no FUSE file system here: stale readers are not tested")
            return
        with test.quiet(f"stale {name}"):
            local = t / "stale" / name.replace(" ", "-")
            local.parent.mkdir(exist_ok=True)
            (backing / "source").mkdir()
            for number in range(1, 5):
                list((point / "source").iterdir())  # the client has a listing before the version appears
                reader = test.start("pull", point / "source", local, "--base", base, "--version", number, "--wait", "20s")
                time.sleep(0.02 * number)
                test.publish(folders[number], backing / "source", base, *(["--full"] if number == 3 else []))
                result = test.end(reader)
                check(result.status == 0, result)
                check(at_version(local, states) == number, f"not at version {number}")
            check(leftovers(local.parent) == [], "leftovers")
        test.unmount(point)


def waiting():
    """A pull of a version that does not exist ends at its deadline, and one that comes late is found."""
    local = t / "waits" / "local"
    local.parent.mkdir()
    result = test.refused("pull", source, local, "--base", base, "--version", 50, "--wait", "1s", mentions=["50"])
    check(0.9 < result.seconds < 10, f"it waited {result.seconds:.1f} s")
    folder = copied(2, "late")
    reader = test.start("pull", folder, local, "--base", base, "--version", 3, "--wait", "30s")
    time.sleep(0.3)
    test.publish(folders[3], folder, base)
    result = test.end(reader)
    check(result.status == 0 and at_version(local, states) == 3, result)


def ranks():
    """All ranks of a job publish together, and one of them is killed."""
    folder, local, numbers = t / "ranks", t / "rank-reader", random.Random(4)
    large = {0: peer.make_model(5, {**peer.SHAPES, **{f"layers.{i}.large": ("BF16", (1024, 1031 + i)) for i in range(6)}})}
    large_base = peer.write_model(t / "rank-base", large[0], files=2)
    program, files = test.words()[0], []
    for number, more in ((1, []), (2, ["--base-copy", t / "rank-copy"]), (3, ["--full"]), (4, [])):
        large[number] = peer.changed_model(large[number - 1], numbers, share=0.001)
        model = peer.write_model(t / "rank-model", large[number], files=3)
        test.ok("run", "-n", 4, "--", program, "publish", model, folder, "--base", large_base, *more)
        if number != 3:
            peer.check_delta(folder / peer.version_name(number), number)
        files.append(len(list((folder / peer.version_name(number)).glob("*.safetensors"))))
        peer.pull(local, large_base, folder, number)
        at_version(local, large)
        test.pull(folder, t / "rank-ours", large_base)
        check(at_version(t / "rank-ours", large) == number, "not the newest version")
    print(f"  files of the versions: {files}")


with test.part("two publishers of one version"):
    results = test.cases("publishers", two_publishers)
    print(f"  {len(results)} races, {sum(results)} lost at the rename")
with test.part(f"{test.options.pullers} pullers on one host"):
    test.cases("pullers", many_pullers, max(2, test.options.count // 2))
with test.part("retention while readers pull"):
    retention()
with test.part("stale readers"):
    stale_reader()
with test.part("waits"):
    waiting()
if "peer.py" not in test.options.program:
    with test.part("four ranks"):
        ranks()
test.finish()
