#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes one place of the sources at a time and reports the changes that no test notices.

1. Copies the tree to a scratch folder, chooses places by a seed and writes all mutants into the copy, each behind a switch (mutants.py).
2. Builds the copy once. Mutants that do not compile, or on which no code depends, are dropped and counted.
3. Runs every test with no mutant on. Each test has to pass; a mapped file (mutant.hpp) records the places that it evaluates.
4. Runs, for each mutant, the tests that evaluate its place, shortest first, until one fails or takes three times as long as usual.
   A test that takes too long runs again without the mutant: on a busy machine the mutant may not be the cause. --budget limits
   the time per mutant; the mutants that it cuts off count as missed until a later run with a larger budget.
"""
import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import Mutant, find_mutants, rewrite, select

HERE = Path(__file__).resolve().parent
HEADER_SIZE = 64
IN_NAMESPACE = "MUSTER_MUTATION_NAMESPACE"
# Not run: tests of the tree or of other software, tests under mpiexec or on a device, and campaigns.
LEFT_OUT = r"interop|minilm|^python|mpiexec|slurm|real devices|^format$|^header|consumer|preloaded|^mutation|campaign"


class Stop(Exception):
    """A reason to report no score."""


def say(words):
    print(words, flush=True)


def call(command, **options):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **options)


class Campaign:
    def __init__(self, arguments):
        self.arguments, self.root = arguments, Path(arguments.source).resolve()
        self.scratch = Path(arguments.scratch or self.root / "build-mutation").resolve()
        self.tree = self.scratch / "tree"
        self.state_size = HEADER_SIZE + arguments.count * len(arguments.seed)
        self.mutants, self.dropped, self.tests, self.usual, self.places, self.results = {}, {}, {}, {}, {}, {}
        self.keys = ("mutants", "dropped", "usual", "places", "results")

    # A resumed campaign reuses every finished part of the work.
    def save(self):
        if self.arguments.resume:
            text = json.dumps({"options": self.options(), **{key: getattr(self, key) for key in self.keys}}, indent=1)
            partial = Path(self.arguments.resume + ".partial")
            partial.write_text(text)
            partial.replace(self.arguments.resume)

    def options(self):
        names = ("seed", "count", "only", "leave_out", "setup")
        return {**{name: getattr(self.arguments, name) for name in names}, "source": str(self.root), "scratch": str(self.scratch)}

    def load(self):
        path = Path(self.arguments.resume or "")
        if not self.arguments.resume or not path.exists():
            return False
        state = json.loads(path.read_text())
        if state["options"] != self.options():
            raise Stop(f"{path} was made with other options, {state['options']}; name another file or use these")
        for key in self.keys:
            setattr(self, key, {int(number) if number.isdigit() else number: value for number, value in state[key].items()})
        self.mutants = {number: Mutant(*mutant) for number, mutant in self.mutants.items()}
        return True

    # 1
    def prepare(self):
        if self.tree.exists():
            shutil.rmtree(self.tree)
        skip = lambda folder, names: [name for name in names if name in (".git", "__pycache__") or (Path(folder) == self.root and name.startswith("build"))]
        shutil.copytree(self.root, self.tree, symlinks=True, ignore=skip)
        folders = [folder for folder in ("src", "tools") if (self.tree / folder).is_dir()]
        self.sources = {}
        for path in sorted(path for folder in folders for path in (self.tree / folder).rglob("*.cpp")):
            name, text = str(path.relative_to(self.tree)), path.read_text()
            if not any(name.startswith(only.rstrip("/") + "/") for only in self.arguments.only or [""]) and self.arguments.only:
                continue
            try:
                find_mutants(name, text)
                self.sources[name] = text
            except ValueError as error:
                say(f"left out: {error}")
        self.mutants = dict(enumerate(select(self.sources, self.arguments.seed, self.arguments.count)))
        if not self.mutants:
            raise Stop("there is no place to change; --only names folders such as src/group")
        header = (HERE / "mutant.hpp").read_text()
        values = f'#define MUSTER_MUTANT_DEFAULT_STATE "{self.state(0)}"\n#define MUSTER_MUTANT_STATE_SIZE {self.state_size}\n'
        (self.tree / "mutant.hpp").write_text(header.replace("#pragma once\n", "#pragma once\n" + values, 1))

    def enter(self):
        """Mounts the copy over the tree, for this process and its children, because a compiler cache knows its files by that path."""
        self.build = self.tree / "build-test"
        if not os.environ.get(IN_NAMESPACE):
            return
        if self.scratch.is_relative_to(self.root):
            place = self.tree / self.scratch.relative_to(self.root)
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", self.scratch, place], check=True)
        if self.arguments.resume:
            # A relative path keeps its folder.
            os.chdir(Path(self.arguments.resume).parent)
            self.arguments.resume = Path(self.arguments.resume).name
        subprocess.run(["mount", "--rbind", self.tree, self.root], check=True)
        self.tree, self.build = self.root, self.root / "build-test"

    def write_sources(self):
        for path in {mutant.path for mutant in self.mutants.values()}:
            wanted = {number: mutant for number, mutant in self.mutants.items() if mutant.path == path and number not in self.dropped}
            text = rewrite(path, self.sources[path], wanted, self.tree / "mutant.hpp")
            if text != (self.tree / path).read_text():
                (self.tree / path).write_text(text)

    # 2
    def compile(self):
        self.write_sources()
        done = call(["meson", "setup", self.build, self.tree, *self.arguments.setup.split()])
        if done.returncode != 0:
            raise Stop(f"the copy of the tree cannot be configured:\n{done.stdout[-3000:]}")
        targets = self.find_tests()
        while True:
            done = call(["ninja", "-C", self.build, "-k", "0", "-j", self.arguments.jobs, *targets])
            if done.returncode == 0:
                break
            (self.scratch / "build.log").write_text(done.stdout)
            bad = set()
            for path, line in re.findall(r"^(?:\S*/tree/|\.\./)?(\S+?):(\d+):\d+: +(?:fatal error|error|required from)", done.stdout, re.M):
                bad |= {number for number, mutant in self.mutants.items()
                        if path.endswith(mutant.path) and mutant.line - 1 <= int(line) <= mutant.last + 1 and number not in self.dropped}
            if not bad:
                raise Stop(f"the unmutated build fails; {self.scratch / 'build.log'} ends with:\n{done.stdout[-3000:]}")
            for number in bad:
                self.dropped[number] = "does not compile"
            say(f"{len(bad)} mutants do not compile and are dropped")
            self.write_sources()
        objects = [path for path in self.build.rglob("*.o")]
        named = set()
        for first in range(0, len(objects), 50):
            done = call(["readelf", "-rW", *objects[first:first + 50]])
            for section in done.stdout.split("Relocation section ")[1:]:
                if re.match(r"'\.rela?\.text", section):  # and not of the debug information
                    named |= {int(number) for number in re.findall(r"muster_mutant_key_(\d+)", section)}
        for number in self.mutants:
            if number not in named and number not in self.dropped:
                self.dropped[number] = "no code depends on it"
        if len(self.dropped) == len(self.mutants):
            raise Stop(f"none of the {len(self.mutants)} mutants changes the compiled code: there is no score")

    def find_tests(self):
        shown = json.loads(subprocess.run(["meson", "introspect", "--tests", "--targets", str(self.build)], check=True, capture_output=True, text=True).stdout)
        outputs = {target["id"]: target["filename"] for target in shown["targets"]}
        names = [test for test in shown["tests"] if not re.search(self.arguments.leave_out, test["name"])]
        self.tests = {test["name"]: test for test in names}
        if not self.tests:
            raise Stop("there are no tests to run")
        files = {file for test in names for target in test["depends"] for file in outputs.get(target, [])}
        return sorted(str(Path(file).relative_to(self.build)) for file in files)

    # Runs of tests.
    def state(self, lane):
        return self.scratch / f"state-{lane}"

    def run(self, name, number, lane, limit):
        """Returns the duration of the test, its end (an exit status, "time") and the places that it evaluated."""
        test = self.tests[name]
        state, place = self.state(lane), self.scratch / f"run-{lane}"
        state.write_bytes(struct.pack("=i", number).ljust(self.state_size, b"\0"))
        state.chmod(0o666)  # some tests change the user
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        environment = {**os.environ, **test["env"], "TMPDIR": str(place)}
        environment.pop(IN_NAMESPACE, None)
        if self.arguments.jobs > 1:
            environment["MUSTER_MUTANT_STATE"] = str(state)
        # A mutant may leave files in /dev/shm, which are removed with the test. Programs that are started without an environment
        # read the default state.
        self.state(0).touch()
        fence = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs none /dev/shm && mount --bind "$1" "$2" && shift 2 && exec "$@"',
                 "fence", state, self.state(0)] if self.fenced else []
        began = time.monotonic()
        with open(self.scratch / f"output-{lane}", "wb") as output:
            process = subprocess.Popen([sys.executable, "-S", HERE / "keeper.py", *fence, *test["cmd"]], cwd=test["workdir"] or self.build,
                                       env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                end = process.wait(limit)
            except subprocess.TimeoutExpired:
                end = "time"
                process.terminate()
                process.wait()
        took = time.monotonic() - began
        shutil.rmtree(place, ignore_errors=True)
        return took, end, [index for index, byte in enumerate(state.read_bytes()[HEADER_SIZE:]) if byte]

    # 3
    def baseline(self):
        probe = call(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"])
        self.fenced = probe.returncode == 0
        left = [name for name in self.tests if name not in self.usual]
        say(f"{len(left)} tests with no mutant on")
        for name in left:
            for attempt in (1, 2):
                took, end, places = self.run(name, -1, 0, 600)
                if end in (0, 77):
                    break
                shutil.copy(self.scratch / "output-0", self.scratch / f"failed-{re.sub('[^A-Za-z0-9]+', '-', name)}")
                say(f"with no mutant on, '{name}' failed ({end}), attempt {attempt} of 2")
            if end not in (0, 77):
                raise Stop(f"the unmutated suite fails: '{name}' ({end}); {self.scratch}/failed-* has the output. "
                           "Make it pass, or leave it out by --leave-out")
            self.usual[name], self.places[name] = took, [] if end == 77 else places
            self.save()

    # 4
    def try_mutant(self, number, lane):
        tests = sorted((name for name in self.tests if number in self.places[name]), key=self.usual.get)
        spent = 0
        for index, name in enumerate(tests):
            if spent > self.arguments.budget:
                return {"outcome": "missed", "tests": index, "left": len(tests) - index, "names": tests[:8]}
            took, end, _ = self.run(name, number, lane, 3 * self.usual[name] + 20)
            spent += took
            while end == "time" and (plain := self.run(name, -1, lane, 600))[0] > 2 * self.usual[name] + 10:
                took, end, _ = self.run(name, number, lane, 3 * plain[0] + 20)
            if end not in (0, 77):
                return {"outcome": "time" if end == "time" else "noticed", "by": name, "tests": len(tests)}
        return {"outcome": "missed" if tests else "not evaluated", "tests": len(tests), "names": tests[:8]}

    def try_all(self):
        lanes, lock = list(range(self.arguments.jobs)), threading.Lock()
        left = [number for number in self.mutants if number not in self.dropped and
                (number not in self.results or self.arguments.again and self.results[number].get("left"))]

        def one(number):
            with lock:
                lane = lanes.pop()
            result, mutant = self.try_mutant(number, lane), self.mutants[number]
            with lock:
                lanes.append(lane)
                self.results[number] = result
                say(f"[{len(self.results)}/{len(self.mutants) - len(self.dropped)}] {mutant.path}:{mutant.line} {mutant.kind}: "
                    f"{result['outcome']}{' by ' + result['by'] if 'by' in result else ''}")
                self.save()

        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            list(pool.map(one, left))

    def report(self):
        folders = {}
        for number, result in self.results.items():
            mutant = self.mutants[number]
            for folder in (str(Path(mutant.path).parent), "all"):
                folders.setdefault(folder, []).append(result["outcome"])
        for outcome, words in (("missed", "Missed: tests evaluate the place, and pass"), ("not evaluated", "No test evaluates the place")):
            say(f"\n{words}")
            for number in sorted(self.results, key=lambda number: self.mutants[number][:2]):
                mutant, result = self.mutants[number], self.results[number]
                if result["outcome"] == outcome:
                    cut = f", {result['left']} not run" if result.get("left") else ""
                    say(f"  {mutant.path}:{mutant.line}: {mutant.kind}: {mutant.change[:200]}" +
                        (f" ({result['tests']} tests{cut}: {', '.join(result['names'])})" if result["tests"] else ""))
        say("\nfolder                   noticed  by time  missed  not evaluated  score")
        for folder in sorted(folders, key=lambda folder: (folder == "all", folder)):
            counts = [folders[folder].count(outcome) for outcome in ("noticed", "time", "missed", "not evaluated")]
            say(f"{folder:24} {counts[0]:7} {counts[1]:8} {counts[2]:7} {counts[3]:14} {100 * sum(counts[:2]) / sum(counts):5.0f}%")
        for reason in sorted(set(self.dropped.values())):
            say(f"dropped: {list(self.dropped.values()).count(reason)}, {reason}")
        seen = {result["by"] for result in self.results.values() if "by" in result}
        say(f"{len(self.tests) - len(seen)} of {len(self.tests)} tests were the first to notice no mutant")

    def work(self):
        self.scratch.mkdir(parents=True, exist_ok=True)
        if not (self.load() and self.tree.exists()):
            self.mutants, self.dropped, self.usual, self.places, self.results = {}, {}, {}, {}, {}
            self.prepare()
            self.enter()
            say(f"{len(self.mutants)} mutants in {len({mutant.path for mutant in self.mutants.values()})} files; building {self.build}")
            self.compile()
            self.save()
        else:
            self.enter()
            self.find_tests()
        self.baseline()
        self.try_all()
        self.report()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=lambda text: [int(seed) for seed in text.split(",")], default=[1], metavar="SEED[,SEED...]", help="chooses the places")
    parser.add_argument("--count", type=int, default=100, help="how many places per seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many compilers, and how many mutants at a time")
    parser.add_argument("--only", action="append", metavar="FOLDER", help="a folder such as src/group; may be given several times")
    parser.add_argument("--resume", metavar="FILE", help="keeps what is done in FILE, and goes on from there")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="the tests of one mutant (default: no limit)")
    parser.add_argument("--again", action="store_true", help="with --resume: also tries the mutants that --budget cut off")
    parser.add_argument("--leave-out", default=LEFT_OUT, metavar="REGEX", help="tests that are not run (default: %(default)s)")
    parser.add_argument("--setup", default="-Dunity=on -Dunity_size=8 -Dcpp_args=-g1 -Dpython=disabled -Dbenches=false", help="options for meson setup (default: %(default)s)")
    parser.add_argument("--source", default=HERE.parent.parent, help="the tree (default: this one)")
    parser.add_argument("--scratch", help="the folder for the copy and its build, 3 GB (default: build-mutation in the tree)")
    arguments = parser.parse_args()
    if os.geteuid() == 0 and not os.environ.get(IN_NAMESPACE) and call(["unshare", "--mount", "true"]).returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, "-B", __file__, *sys.argv[1:]])
    try:
        Campaign(arguments).work()
    except Stop as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
