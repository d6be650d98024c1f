#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the mutation campaign on a small tree: its choices, its sources, its report, and its refusals."""
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from mutants import find_mutants, rewrite, select

HERE = Path(__file__).resolve().parent
SOURCE = """int limit = 3;
void count(int& value, int step) {
  value = value + step;
}
bool is_small(int value) {
  if (value < 10 && value != 5) {
    return true;
  }
  return false;
}
"""
SAME = """int same(int value) {
  return value < 10 ? value : value;
}
"""
MAIN = """void count(int& value, int step);
bool is_small(int value);
int same(int value);
int main() {
  int value = 8;
  count(value, 1);
  return value == 9 && is_small(9) && !is_small(10) && !is_small(5) && same(1) == 1 ? STATUS : 1;
}
"""


class Selection(unittest.TestCase):
    def changes(self, body):
        return {(mutant.kind, mutant.text.format(n=7).replace("\1", "OLD")) for mutant in find_mutants("x.cpp", body)}

    def test_each_kind(self):
        found = self.changes(SOURCE)
        for wanted in [
            ("offset", "{ if (MUSTER_MUTANT(7)) value = value + 1 + step; else OLD }"),
            ("statement removed", "{ if (!MUSTER_MUTANT(7)) OLD }"),
            ("early return", "{ if (MUSTER_MUTANT(7)) return; OLD }"),
            ("comparison", "(MUSTER_MUTANT(7) ? (value <= 10 && value != 5) : (OLD))"),
            ("logic", "(MUSTER_MUTANT(7) ? (value < 10 || value != 5) : (OLD))"),
            ("check removed", "(!MUSTER_MUTANT(7) && (OLD))"),
            ("constant", "{ if (MUSTER_MUTANT(7)) return false; OLD }"),
        ]:
            self.assertIn(wanted, found)

    def test_what_would_not_compile_is_no_place(self):
        for body in ["constexpr int f() { return 1 + 1; }", "int x = 1 + 1;", "int f() { static const int x = 1 + 1; throw x; }",
                     "enum E { a = 1 };", "struct S { int x = 1; };", "int f() { if (const int x = g()) { } using T = A<1>; break; }"]:
            self.assertEqual(self.changes(body), set(), body)

    def test_statements_in_lambdas_and_methods(self):
        found = self.changes("struct S { void f() const noexcept { each([&](int x) { if (x == 1) g(x); }); } };\nS::S() : a_(1), b_{2} { h(); }")
        self.assertIn(("comparison", "(MUSTER_MUTANT(7) ? (x != 1) : (OLD))"), found)
        self.assertEqual(sum(kind == "statement removed" for kind, _ in found for _ in [0]), 1)
        self.assertEqual(len([1 for mutant in find_mutants("x.cpp", "S::S() : a_(1), b_{2} { h(); }") if mutant.kind == "statement removed"]), 1)

    def test_a_seed_decides_and_mutants_do_not_overlap(self):
        sources = {"a.cpp": SOURCE, "b.cpp": SOURCE}
        chosen = select(sources, [5], 8)
        self.assertEqual(chosen, select(sources, [5], 8))
        self.assertNotEqual(chosen, select(sources, [5, 6], 4))
        for mutant in chosen:
            self.assertFalse([other for other in chosen if other is not mutant and other.path == mutant.path and
                              other.start < mutant.end and mutant.start < other.end])

    def test_lines_keep_their_numbers(self):
        chosen = dict(enumerate(mutant for mutant in select({"a.cpp": SOURCE}, [5], 4)))
        text = rewrite("a.cpp", SOURCE, chosen, "mutant.hpp").split('#line 1 "a.cpp"\n')[1]
        self.assertEqual(text.count("\n"), SOURCE.count("\n"))
        self.assertEqual(text.count("MUSTER_MUTANT("), len(chosen))


class Run(unittest.TestCase):
    def campaign(self, source=SOURCE, status=0, options=()):
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "given"
            (tree / "src/part").mkdir(parents=True)
            (tree / "src/part/part.cpp").write_text(source)
            (tree / "src/same").mkdir()
            (tree / "src/same/same.cpp").write_text(SAME)
            (tree / "main.cpp").write_text(MAIN.replace("STATUS", str(status)))
            (tree / "meson.build").write_text("project('small', 'cpp')\ntest('all of it', executable('small', 'src/part/part.cpp', 'src/same/same.cpp', 'main.cpp'))\n")
            before = (tree / "src/part/part.cpp").read_text()
            done = subprocess.run([sys.executable, HERE / "campaign.py", "--source", tree, "--scratch", Path(folder) / "scratch", "--setup=-Doptimization=2",
                                   "--leave-out=^none$", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual((tree / "src/part/part.cpp").read_text(), before)
            return done.returncode, done.stdout

    def test_what_is_noticed_and_what_is_missed(self):
        unused = SOURCE + "int never(int value) {\n  return value + 1;\n}\n"
        status, output = self.campaign(unused, options=["--count=100", "--seed=3"])
        self.assertEqual(status, 0, output)
        self.assertRegex(output, r"part.cpp:3 (offset|statement removed|early return): noticed by all of it")
        self.assertRegex(output, r"No test evaluates the place\n  src/part/part.cpp:12:")
        self.assertIn("dropped: 1, no code depends on it", output)
        self.assertRegex(output, r"\nall +\d+ +0 +0 +1 +\d+%")

    def test_no_score_of_a_suite_that_fails(self):
        status, output = self.campaign(status=3)
        self.assertEqual(status, 1, output)
        self.assertIn("error: the unmutated suite fails: 'all of it' (3)", output)
        self.assertNotIn("score", output)

    def test_no_score_of_a_build_that_fails(self):
        status, output = self.campaign(SOURCE + "int broken( {}\n")
        self.assertEqual(status, 1, output)
        status, output = self.campaign(SOURCE + "\n\n\nint broken = unknown;\n")
        self.assertEqual(status, 1, output)
        self.assertIn("error: the unmutated build fails", output)

    def test_no_score_where_the_code_stays_the_same(self):
        status, output = self.campaign(options=["--only=src/same"])
        self.assertEqual(status, 1, output)
        self.assertIn("none of the 1 mutants changes the compiled code", output)


if __name__ == "__main__":
    if shutil.which("meson") is None or shutil.which("readelf") is None:
        print("skipped: the campaign needs meson and readelf")
        sys.exit(77)
    unittest.main()
