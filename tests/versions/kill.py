#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills `muster publish` and `muster pull` at random moments, and at each system call of the fault-injection seam.

After a kill of publish, the source has no new version or the whole one, and the next publish succeeds and deletes the
leftovers. After a kill of pull, the local copy is one whole version, the earlier or the new one, and the next pull
succeeds. MUSTER_HOOKED names the program of hooked.cpp; without it the moments are only random.

    kill.py --count 500 --seed 1     500 random kills of each command
"""

import errno
import json
import os
import random
import shutil
import signal
import time

import peer
from support import Test, at_version, check, leftovers, same, snapshot, versions_in

test = Test(__doc__, count=15, stride=1)
t = test.folder
hooked = os.environ.get("MUSTER_HOOKED")
shapes = {**peer.SHAPES, "model.large": ("BF16", (700, 501))}
states = {0: peer.make_model(1, shapes)}
numbers = random.Random(2)
for i in range(1, 7):
    states[i] = states[i - 1] if i == 3 else peer.changed_model(states[i - 1], numbers)
base = peer.write_model(t / "base", states[0], files=3)
folders = {i: peer.write_model(t / f"model{i}", states[i], files=2) for i in states}
RECORD = ".weight_sync/muster.json"

# Versions 1 and 2 are deltas, 4 is full, 3 changes nothing.
source = t / "source"
for i in range(1, 6):
    test.publish(folders[i], source, base, *(["--full"] if i == 4 else []))


def source_of(count, name):
    """Returns a copy of the source with its first versions."""
    folder = t / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for i in range(1, count + 1):
        shutil.copytree(source / peer.version_name(i), folder / peer.version_name(i))
    return folder


def killed(words, delay, environment=None):
    """Runs a command and kills it after a time. Returns whether it was killed."""
    process = test.start(*words, environment=environment)
    if delay is not None:
        time.sleep(delay)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    result = test.end(process, words)
    check(result.status in (0, -signal.SIGKILL), result)
    return result.status != 0


def check_source(folder, before, encoding_of_next=("xor",)):
    """After a kill of the publisher of version before + 1. Returns whether the version exists."""
    found = versions_in(folder)
    check(found in (list(range(1, before + 1)), list(range(1, before + 2))), f"versions {found}")
    others = [name for name in os.listdir(folder) if not name.startswith("weight_v0") or not name[8:].isdigit()]
    check(all(f"{peer.version_name(before + 1)}.partial-" in name or name.startswith(".") for name in others), f"other names: {others}")
    if len(found) == before + 1:
        version = folder / peer.version_name(before + 1)
        if peer.is_delta(version):
            peer.check_delta(version, before + 1)
        local = t / "judge"
        shutil.rmtree(local, ignore_errors=True)
        peer.pull(local, base, folder, before + 1)
        same(peer.read_model(local), states[before + 1])
    test.pull(folder, t / "judge2", base)
    check(at_version(t / "judge2", states) == len(found), "pull: another version")
    return len(found) > before


def next_publish(folder, before, exists, more):
    number = before + 2 if exists else before + 1
    test.publish(folders[number], folder, base, "--version", number, *more)
    check(leftovers(folder) == [], f"leftovers: {leftovers(folder)}")
    local = t / "judge"
    peer.pull(local, base, folder, number)
    at_version(local, states)


def publish_words(folder, before, more):
    return ["publish", folders[before + 1], folder, "--base", base, *more]


KINDS = [[], ["--full"], ["--encoding", "overwrite"], ["--base-copy", t / "base-copy"]]


def kill_publish(i, numbers):
    more, before = KINDS[i % len(KINDS)], 1 + i % 3
    folder = source_of(before, "killed")
    shutil.rmtree(t / "base-copy", ignore_errors=True)
    was_killed = killed(publish_words(folder, before, more), numbers.uniform(0, 1.1 * durations[i % len(KINDS)]))
    exists = check_source(folder, before)
    check(was_killed or exists, "publish succeeded, and there is no version")
    next_publish(folder, before, exists, more)
    return was_killed, exists


# ---- pull ----
local = t / "places" / "local"
local.parent.mkdir()


def check_local(old, new):
    """After a kill. `old` None: there was no copy. Returns the version of the copy."""
    if old is None and not (local / ".weight_sync" / "state.json").exists():
        check(not list(local.glob("*.safetensors")) if local.exists() else True, "a copy without a marker")
        return None
    at = at_version(local, states)
    check(at in (old, new), f"version {at}, neither {old} nor {new}")
    record = json.loads((local / RECORD).read_text())
    if "version" in record:
        check(int(record["version"]) == at, f"the record names version {record['version']}, the marker {at}")
    return at


def next_pull(number):
    test.pull(source, local, base, "--version", number)
    check(at_version(local, states) == number, "another version")
    check(leftovers(local.parent) == [] and leftovers(local / ".weight_sync") == [], f"leftovers: {leftovers(local.parent)}")


def kill_pull(i, numbers):
    if i % 5 == 0:
        shutil.rmtree(local, ignore_errors=True)
    old = peer.marker(local)
    new = numbers.choice([n for n in (1, 2, 4, 5) if n != old])
    more = ["--durability", ("boot", "synced")[i % 2]]
    words = ["pull", source, local, "--base", base, "--version", new, *more]
    was_killed = killed(words, numbers.uniform(0, 1.1 * pull_duration))
    at = check_local(old, new)
    check(was_killed or at == new, f"pull succeeded, and the copy is at {at}")
    next_pull(numbers.choice([new, numbers.choice([1, 2, 3, 5])]))
    return was_killed, at == new


def summary(name, results):
    print(f"{name}: {len(results)} runs, {sum(killed for killed, _ in results)} killed before the end, {sum(new for _, new in results)} with the new version", flush=True)


with test.part("durations"):
    durations = [test.publish(folders[3], source_of(2, "timed"), base, *more).seconds for more in KINDS]
    test.pull(source, local, base, "--version", 1)
    pull_duration = test.pull(source, local, base, "--version", 5).seconds
    print(f"publish {min(durations):.3f} to {max(durations):.3f} s, pull {pull_duration:.3f} s")
if test.failures:
    test.finish()
if not hooked or test.options.stride:
    with test.part("random kills"):
        summary("publish", test.cases("publish", kill_publish))
        summary("pull", test.cases("pull", kill_pull))

# ---- each call of the seam ----


def calls_of(words):
    log = t / "calls"
    log.unlink(missing_ok=True)
    check(not killed(words, None, {"MUSTER_TEST_CALLS": str(log)}), "not ended")
    return [line.split(" ", 1) for line in log.read_text().splitlines()]


def at_each_call(name, prepare, words, judge):
    """Kills the hooked program before each call. Threads make the numbers inexact, so a little more are tried."""
    prepare()
    calls = calls_of(words)
    results = []
    for number in range(1, len(calls) + 3, test.options.stride):
        with test.quiet(f"{name}, killed at call {number} of {len(calls)} ({' '.join(calls[min(number, len(calls)) - 1])})"):
            prepare()
            was_killed = killed(words, None, {"MUSTER_TEST_KILL": str(number)})
            results.append((was_killed, judge()))
        if test.failures > 20:
            return
    summary(name, results)


def with_errors(name, prepare, words, judge):
    """Lets each call fail once. The command succeeds, or it is refused with the earlier state."""
    prepare()
    calls = [call for call, _ in calls_of(words)]
    late = failed = 0
    for call in sorted(set(calls)):
        for number in range(1, calls.count(call) + 1, test.options.stride):
            fault = f"{call}:{'ENOSPC' if call in ('pwrite', 'create', 'mkdir', 'fallocate') and number % 2 else 'EIO'}:{number}"
            with test.quiet(f"{name}, MUSTER_FAULT={fault}"):
                prepare()
                result = test.run(*words, environment={"MUSTER_FAULT": fault})
                if result.status != 0:
                    failed += 1
                    test.is_refusal(result)
                    check("injected" in result.err or os.strerror(errno.EIO) in result.err or os.strerror(errno.ENOSPC) in result.err or str(t) in result.err, f"no cause: {result}")
                is_new = judge()
                check(result.status != 0 or is_new, f"success without the new version: {result}")
                if result.status != 0 and is_new:
                    late += 1
                    print(f"  note: status 2 and the new version: {fault}: {result.err.strip()}")
            if test.failures > 20:
                return
    print(f"{name}: {len(calls)} calls, {failed} errors, {late} of them after the new version appeared", flush=True)


if hooked:
    test.options.program = hooked
    folder = t / "killed"
    for more in KINDS:
        def prepare_publish(more=more):
            source_of(2, "killed")
            shutil.rmtree(t / "base-copy", ignore_errors=True)

        def judge_publish(more=more):
            exists = check_source(folder, 2)
            next_publish(folder, 2, exists, more)
            return exists

        words = publish_words(folder, 2, more)
        with test.part(f"publish {' '.join(map(str, more))}: each call"):
            at_each_call("publish, kills", prepare_publish, words, judge_publish)
            with_errors("publish, errors", prepare_publish, words, judge_publish)
    for old, new, durability in ((2, 5, "boot"), (1, 2, "synced"), (None, 5, "synced")):
        def prepare_pull(old=old):
            shutil.rmtree(local, ignore_errors=True)
            if old is not None:
                test.pull(source, local, base, "--version", old)

        def judge_pull(old=old, new=new):
            at = check_local(old, new)
            next_pull(new)
            return at == new

        words = ["pull", source, local, "--base", base, "--version", new, "--durability", durability]
        with test.part(f"pull {old} to {new}, {durability}: each call"):
            at_each_call("pull, kills", prepare_pull, words, judge_pull)
            with_errors("pull, errors", prepare_pull, words, judge_pull)

check(snapshot(base) and versions_in(source) == [1, 2, 3, 4, 5], "the base or the source changed")
test.finish()
