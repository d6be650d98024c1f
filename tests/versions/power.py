#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Power failures. After `muster publish` and `muster pull --durability synced` have succeeded, everything is on the disk,
and no name is given to bytes or names that are not. With `boot`, the record is void after a reboot.

One test replays the calls of the fault-injection seam on a model of a disk (MUSTER_HOOKED). The other one runs on a FUSE
file system that loses unsynced bytes (MUSTER_FAULTY_FS).
"""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import peer
from support import Test, at_version, check, leftovers, same, versions_in

test = Test(__doc__, count=10)
t = test.folder
hooked = os.environ.get("MUSTER_HOOKED")
states = {0: peer.make_model(1)}
numbers = random.Random(2)
for i in range(1, 5):
    states[i] = peer.changed_model(states[i - 1], numbers)
base = peer.write_model(t / "base", states[0], files=2)
folders = {i: peer.write_model(t / f"model{i}", states[i], files=2) for i in states}
RECORD = ".weight_sync/muster.json"
(t / "places").mkdir()


class Disk:
    """Knows which bytes and names under a folder are not synced. A call applies to a path; a rename names its target. The
    log does not tell whether a call succeeded, so folders that exist before do not count as made."""

    def __init__(self, folder, existing):
        self.folder, self.existing, self.dirty, self.names, self.wrong = str(folder), existing, set(), set(), []

    @staticmethod
    def is_growing(path):
        return ".partial-" in path or ".replaced-" in path

    def grown(self, path):
        """Returns what is unsynced in the unfinished entry that becomes `path`."""
        inside = re.compile(re.escape(path) + r"\.partial-[^/]*(/.*)?")
        return [f"the bytes of {file}" for file in sorted(self.dirty) if inside.fullmatch(file)] + \
            [f"the name {name}" for name in sorted(self.names) if inside.fullmatch(os.path.dirname(name))]

    def note(self, call, path):
        if call == "fsync-directory":
            self.names = {name for name in self.names if os.path.dirname(name) != path}
        elif not path.startswith(self.folder):
            return
        elif call in ("fsync", "fdatasync"):
            self.dirty.discard(path)
        elif call in ("unlink", "rmdir"):
            self.dirty.discard(path)
            self.names.discard(path)
        elif call in ("rename", "plain-rename", "exchange"):
            self.wrong += [f"{path} gets its name before {what} is on the disk" for what in self.grown(path)]
            self.names.add(path)
        elif call in ("create", "link") or call == "mkdir" and path not in self.existing:
            self.names.add(path)
        if call in ("pwrite", "create", "fallocate", "ftruncate", "copy_file_range"):
            self.dirty.add(path)

    def losses(self):
        return self.wrong + [f"the bytes of {path}" for path in sorted(self.dirty) if not self.is_growing(path)] + \
            [f"the name {path}" for path in sorted(self.names) if not self.is_growing(path)]


def losses(folder, *words):
    log = t / "calls"
    log.unlink(missing_ok=True)
    existing = {str(path) for path in t.rglob("*") if path.is_dir()}
    program, test.options.program = test.options.program, hooked
    test.ok(*words, environment={"MUSTER_TEST_CALLS": str(log)})
    test.options.program = program
    disk = Disk(folder, existing)
    for line in log.read_text().splitlines():
        disk.note(*line.split(" ", 1))
    return disk.losses()


if hooked:
    with test.part("publish: all names and bytes are synced in order"):
        lost = [losses(t / "source", "publish", folders[number], t / "source", "--base", base, *more)
                for number, more in ((1, []), (2, ["--full"]), (3, ["--encoding", "overwrite"]))]
        check(lost == [[], [], []], lost)
    with test.part("pull --durability synced: all names and bytes are synced in order"):
        for number in (1, 2, 3):
            # The lock files are not part of the copy.
            lost = losses(t / "places" / "local", "pull", t / "source", t / "places" / "local", "--base", base, "--version", number, "--durability", "synced")
            check(lost == [], f"pull {number}: {lost}")
    with test.part("pull --durability boot: nothing waits for the disk"):
        log = t / "calls"
        log.unlink()
        test.options.program, program = hooked, test.options.program
        test.pull(t / "source", t / "places" / "boot", base, environment={"MUSTER_TEST_CALLS": str(log)})
        test.options.program = program
        synced = [line for line in log.read_text().splitlines() if line.startswith(("fsync", "fdatasync"))]
        check(synced == [], synced)

# ---- the record of another boot ----
with test.part("the record of another boot is void"):
    source, local = t / "boots", t / "places" / "boots"
    for number in (1, 2, 3):
        test.publish(folders[number], source, base)
    for synced in (False, True):
        for target in (2, 3):
            # After a reboot, a page that was never written back has zeros, and the file looks as before.
            shutil.rmtree(local, ignore_errors=True)
            test.pull(source, local, base, "--version", 2, *(["--durability", "synced"] if synced else []))
            if not synced:
                file = max(local.glob("*.safetensors"), key=lambda path: path.stat().st_size)
                status = file.stat()
                with open(file, "r+b") as opened:
                    opened.seek(status.st_size // 2)
                    opened.write(bytes(64))
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            record = json.loads((local / RECORD).read_text())
            check(record["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8] + record["boot"][8:], "the record does not name the boot")
            (local / RECORD).write_text(json.dumps({**record, "boot": "0" * len(record["boot"])}))
            test.pull(source, local, base, "--version", target)
            check(at_version(local, states) == target, f"not at version {target}")

# ---- a disk that loses unsynced bytes ----


def cut_after(words, point, delay):
    """Runs a command, kills it after a time if one is given, and cuts the power."""
    process = test.start(*words)
    if delay is not None:
        time.sleep(delay)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    result = test.end(process)
    check(result.status in (0, -signal.SIGKILL), result)
    test.cut_power(point)
    return result.status == 0


backing = t / "disk"
backing.mkdir()
point = test.mount(backing)
if point is None:
    print("no FUSE file system here: its power failures are not tested")
else:
    with test.part("publish on a disk that loses unsynced bytes"):
        source = point / "source"
        timed = {}
        for number, more in ((1, []), (2, ["--full"]), (3, ["--encoding", "overwrite"])):
            began = time.monotonic()
            cut_after(["publish", folders[number], source, "--base", base, *more], point, None)
            timed[number] = time.monotonic() - began
            peer.pull(t / "judge", base, backing / "source", number)
            at_version(t / "judge", states)

        def killed_publish(i, numbers):
            shutil.rmtree(t / "judge", ignore_errors=True)
            shutil.rmtree(source, ignore_errors=True)
            before = i % 3
            for number in range(1, before + 1):
                test.publish(folders[number], source, base)
            ended = cut_after(["publish", folders[before + 1], source, "--base", base], point, numbers.uniform(0, 1.1 * timed[1]))
            found = versions_in(backing / "source") if (backing / "source").exists() else []
            check(found in (list(range(1, before + 1)), list(range(1, before + 2))), f"versions {found}")
            check(not ended or len(found) > before, "publish succeeded, and there is no version")
            for number in found:
                peer.pull(t / "judge", base, backing / "source", number)
                at_version(t / "judge", states)
            test.publish(folders[len(found) + 1], source, base)
            check(leftovers(backing / "source") == [], "leftovers")
            return ended, len(found) > before

        results = test.cases("publish, power", killed_publish)
        print(f"  {len(results)} runs, {sum(not ended for ended, _ in results)} killed, {sum(new for _, new in results)} with the new version")

    with test.part("pull --durability synced on a disk that loses unsynced bytes"):
        source, local = t / "stream", point / "places" / "local"
        local.parent.mkdir()
        for number in (1, 2, 3):
            test.publish(folders[number], source, base, *(["--full"] if number == 2 else []))
        began = time.monotonic()
        cut_after(["pull", source, local, "--base", base, "--version", 1, "--durability", "synced"], point, None)
        took = time.monotonic() - began
        check(at_version(local, states) == 1, "not at version 1")

        def killed_pull(i, numbers):
            old = peer.marker(local)
            new = numbers.choice([n for n in (1, 2, 3) if n != old])
            ended = cut_after(["pull", source, local, "--base", base, "--version", new, "--durability", "synced"], point, numbers.uniform(0, 1.1 * took))
            at = at_version(local, states)
            check(at == new or (at == old and not ended), f"version {at} after {old} to {new}")
            test.pull(source, local, base, "--version", new, "--durability", "synced")
            check(at_version(local, states) == new and leftovers(local.parent) == [], "the next pull")
            return ended, at == new

        results = test.cases("pull, power", killed_pull)
        print(f"  {len(results)} runs, {sum(not ended for ended, _ in results)} killed, {sum(new for _, new in results)} with the new version")

test.finish()
