# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of versions. MUSTER_PROGRAM, or --program, names the program under test.

A program test makes a Test, calls check() and the methods of Test, and ends with finish(). Everything is in one temporary
folder, so the tests can run side by side.
"""

import argparse
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.dont_write_bytecode = True
import peer  # noqa: E402

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_JOB", "NO_COLOR", "MUSTER_FAULT"):
    os.environ.pop(name, None)


class Result:
    def __init__(self, words, status, out, err, seconds):
        self.words, self.status, self.out, self.err, self.seconds = words, status, out, err, seconds

    def __str__(self):
        return f"status {self.status}: {' '.join(self.words[1:])}: {self.err.strip() or self.out.strip()[-300:]}"


class Failed(Exception):
    pass


def check(condition, words):
    if not condition:
        raise Failed(str(words))


class Test:
    def __init__(self, description, count=0, seed=2026, **more):
        """`more`: further options with their default values."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--program", default=os.environ.get("MUSTER_PROGRAM"), help="the program under test")
        parser.add_argument("--count", type=int, default=count, help="how many random cases")
        parser.add_argument("--seed", type=int, default=seed)
        parser.add_argument("--only", type=int, help="run this random case alone, and keep its folder")
        for name, default in more.items():
            parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
        self.options = parser.parse_args()
        if not self.options.program:
            parser.error("MUSTER_PROGRAM or --program must name the program under test")
        # In memory if there is room: the tests do not measure the disk.
        room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30
        self.folder = Path(tempfile.mkdtemp(prefix="versions-", dir="/dev/shm" if room else None))
        self.mounts = []
        self.failures = 0

    # ---- processes ----

    def words(self, *words):
        program = str(self.options.program)
        return [*([sys.executable] if program.endswith(".py") else []), program, *map(str, words)]

    def start(self, *words, environment=None, **more):
        return subprocess.Popen(self.words(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True, env={**os.environ, **(environment or {})}, **more)

    @staticmethod
    def end(process, words=(), limit=60, began=None):
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Failed(f"not ended after {limit} s: {' '.join(process.args)}") from late
        return Result(process.args, process.returncode, out, err, time.monotonic() - began if began else 0)

    def run(self, *words, environment=None, limit=60):
        began = time.monotonic()
        return self.end(self.start(*words, environment=environment), limit=limit, began=began)

    def ok(self, *words, **more):
        result = self.run(*words, **more)
        check(result.status == 0, result)
        return result

    def refused(self, *words, mentions=(), **more):
        result = self.run(*words, **more)
        return self.is_refusal(result, mentions)

    @staticmethod
    def is_refusal(result, mentions=()):
        check(result.status == 2, f"not refused: {result}")
        check(result.out == "" and result.err.count("\n") == 1, f"not one line of standard error: {result}{result.out}")
        check(re.match("muster|peer", result.err), f"another beginning: {result}")
        for text in mentions:
            check(text in result.err, f'no "{text}" in the message: {result}')
        return result

    def publish(self, model, source, base, *more, **settings):
        return self.ok("publish", model, source, "--base", base, *more, **settings)

    def pull(self, source, local, base, *more, **settings):
        return self.ok("pull", source, local, "--base", base, *more, **settings)

    # ---- FUSE ----

    def mount(self, backing, *rules):
        """Mounts tests/faults/faulty_fs, which MUSTER_FAULTY_FS names. Returns the mount point, or None if that is
        impossible here."""
        program = os.environ.get("MUSTER_FAULTY_FS", "")
        if not program or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return None
        point = Path(tempfile.mkdtemp(prefix="mount-", dir=self.folder))
        server = subprocess.Popen([program, str(backing), str(point), *rules], stderr=subprocess.DEVNULL)
        self.mounts.append((server, point))
        for _ in range(500):
            if os.path.ismount(point):
                return point
            if server.poll() is not None:
                break
            time.sleep(0.01)
        return None

    def cut_power(self, point):
        """All bytes that were not synced through this mount become zeros."""
        server = next(server for server, mounted in self.mounts if mounted == point)
        server.send_signal(signal.SIGUSR1)
        time.sleep(0.03)
        with contextlib.suppress(OSError):
            os.stat(point / "nothing")

    def unmount(self, point):
        entry = next(entry for entry in self.mounts if entry[1] == point)
        self.mounts.remove(entry)
        entry[0].terminate()
        entry[0].wait()
        if os.path.ismount(point):
            subprocess.run(["fusermount3", "-u", "-z", point], check=False)

    # ---- the end ----

    @contextlib.contextmanager
    def part(self, name):
        """A part that fails does not stop the following ones."""
        began = time.monotonic()
        try:
            yield
            print(f"{name}: passed in {time.monotonic() - began:.1f} s", flush=True)
        except (Failed, peer.Refused, OSError, ValueError, KeyError, AssertionError) as error:
            self.failures += 1
            if type(error) is not Failed:
                error = f"{type(error).__name__} in line {error.__traceback__.tb_next.tb_lineno if error.__traceback__.tb_next else 0}: {error}"
            print(f"FAILED: {name}: {str(error)[:1500]}", flush=True)

    def cases(self, name, run, count=None):
        """Runs run(i, numbers) for many random cases, each with its own seed. Returns the results."""
        results = []
        for i in [self.options.only] if self.options.only is not None else range(count or self.options.count):
            with self.quiet(f"{name} {i} (--seed {self.options.seed} --only {i})"):
                results.append(run(i, random.Random(f"{self.options.seed} {name} {i}")))
            if self.failures > 40:
                break
        return results

    @contextlib.contextmanager
    def quiet(self, name):
        try:
            yield
        except (Failed, peer.Refused, OSError, ValueError, KeyError, AssertionError) as error:
            self.failures += 1
            print(f"FAILED: {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)

    def finish(self):
        for _, point in list(self.mounts):
            self.unmount(point)
        if self.options.only is None:
            shutil.rmtree(self.folder)
        else:
            print("kept:", self.folder)
        print("all as it should be" if self.failures == 0 else f"{self.failures} failures")
        sys.exit(self.failures != 0)


# ---- states of folders ----


def snapshot(folder):
    """Returns the contents of a folder. The lock file does not count, and a missing folder is empty."""
    folder, found = Path(folder), {}
    for path in sorted(folder.rglob("*")):
        if path.name == "lock":
            continue
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.is_file() and hashlib.blake2b(path.read_bytes()).hexdigest()
    return found


def same(one, other):
    """Fails unless two models have equal names, dtypes, shapes and bytes."""
    if one != other:
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        raise Failed(f"{len(names)} other tensors: {names[:4]}")


def at_version(local, models):
    """Checks that a local copy is one whole version, marker and bytes, and returns its number."""
    number = peer.marker(local)
    check(number in models, f"the marker is {number}")
    same(peer.read_model(local), models[number])
    check((Path(local) / "config.json").exists(), "config.json is missing")
    return number


def leftovers(folder):
    """Returns names of unfinished files and directories."""
    return sorted(name for name in os.listdir(folder) if ".partial-" in name or ".replaced-" in name or name.endswith(".tmp"))


def versions_in(source):
    return sorted(int(name[8:]) for name in os.listdir(source) if re.fullmatch(r"weight_v\d{6}", name))
