# SPDX-License-Identifier: Apache-2.0
"""Runs the commands and programs of a manual page, or checks the links and the paths of all pages.

usage: pages.py links SOURCE
       pages.py fragments SOURCE COMPILER-WITH-FLAGS...
       pages.py run SOURCE PAGE [COMPILER-WITH-FLAGS...]
       pages.py update SOURCE PAGE [COMPILER-WITH-FLAGS...]

`update` works like `run`, and writes the output of commands to the page where it differs. Review the result. `run`
works through the fenced blocks of PAGE in their order, in a temporary directory with one shell:

- A block whose preceding paragraph ends with "as `NAME`:" is written to the file NAME.
- A `console` block has commands after "$ " (continued after "> ") and below each command its output. In the expected
  output, "..." stands for any text within a line, a line "..." for any lines, and a time or a rate for any time or rate
  of that unit. A command must succeed, unless the next command is `echo $?`.
- A `python` or `cpp` block that is not saved must be valid Python, or is compiled by `fragments`.

These comments before a block do not appear on the page:

- <!-- not run: REASON --> leaves out the block, and prints the reason.
- <!-- setup: COMMAND --> runs a command that a reader does not need, such as one that makes input files.

`links` also checks that paths of the tree in backquotes exist. A path may have a pattern, and NAME as a placeholder.

The environment has MUSTER_BUILD, the build folder, and MUSTER_TEST_PYTHON, the interpreter that the page calls python.
"""

import ast
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unicodedata
import urllib.parse

LIMIT = 120  # seconds for one command
FENCE = re.compile(r"^( *)(```+|~~~+)(.*)$")
COMMENT = re.compile(r"^<!-- (not run|setup): (.*?) -->$")
NUMBER = r"[0-9][0-9.,]*(?: to [0-9][0-9.,]*)?"
MEASURED = re.compile(rf"{NUMBER} (ns|us|ms|s|[kMG]?B/s)\b")


class Failure(Exception):
    pass


class Block:
    def __init__(self, page, line, language):
        self.page, self.line, self.language = page, line, language
        self.lines = []
        self.file = None  # where the page tells the reader to save it
        self.notes = []  # (kind, text) of the comments before it

    @property
    def text(self):
        return "\n".join(self.lines) + "\n"

    def fail(self, message, line=0):
        raise Failure(f"{self.page}:{self.line + line}: {message}")


def blocks_of(path, page):
    """Returns the fenced blocks of a page, and last a block without a language that has the comments at the end."""
    blocks, block, notes, before, ended = [], None, [], "", True
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if block is not None:
            if fence and fence[2] == ending and not fence[3].strip():
                blocks.append(block)
                block, before, ended = None, "", True
            else:
                block.lines.append(line.removeprefix(indent))
        elif fence:
            indent, ending = fence[1], fence[2]
            block = Block(page, number, fence[3].strip())
            saved = re.search(r"\bas `([^`\s]+)`:$", before)
            block.file = saved[1] if saved else None
            block.notes, notes = notes, []
        elif comment := COMMENT.match(line):
            notes.append((comment[1], comment[2]))
        elif not line.strip():
            ended = True  # the paragraph
        else:
            before = line if ended else f"{before} {line}"
            ended = False
    if block is not None:
        block.fail("this block does not end")
    last = Block(page, 0, "")
    last.notes = notes
    return [*blocks, last]


class Shell:
    """One bash, whose directory and variables stay from one command to the next."""

    def __init__(self, directory, environment):
        self.mark = f"end-of-command-{os.getpid()}"
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )
        self.status = 0

    def run(self, command):
        """Returns the output of a command; `status` has its exit status."""
        expired = threading.Timer(LIMIT, self.end)
        expired.start()
        try:
            self.process.stdin.write(f"(exit {self.status})\n{command}\nprintf '\\n%s %s\\n' {self.mark} $?\n")
            self.process.stdin.flush()
            output = ""
            for line in self.process.stdout:
                if line.startswith(self.mark + " "):
                    self.status = int(line.split()[1])
                    return output.removesuffix("\n")
                output += line
        except BrokenPipeError:
            pass
        finally:
            expired.cancel()
        raise Failure(f"the shell ended, or ran for more than {LIMIT} s, in: {command}")

    def directory(self):
        status = self.status
        path = pathlib.Path(self.run("pwd").strip())
        self.status = status
        return path

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def commands_of(block):
    """Returns the commands of a console block, with the number of the line and the expected lines of each."""
    commands = []
    for number, line in enumerate(block.lines, 1):
        if line.startswith("$ "):
            commands.append([number, line[2:], []])
        elif not commands:
            block.fail('a console block must begin with a command after "$ "', number)
        elif line.startswith("> ") and not commands[-1][2]:
            commands[-1][1] += "\n" + line[2:]
        else:
            commands[-1][2].append(line)
    return commands


def pattern_of(expected):
    parts = []
    for line in expected:
        if line.strip() == "...":
            parts.append(r"(?:[^\n]*\n)*?")
            continue
        pattern, begin = "", 0
        line = line.rstrip()
        for special in re.finditer(rf"\.\.\.|{MEASURED.pattern}", line):
            pattern += re.escape(line[begin : special.start()])
            pattern += r"[^\n]*?" if special[0] == "..." else rf"{NUMBER} {re.escape(special[1])}"
            begin = special.end()
        parts.append(pattern + re.escape(line[begin:]) + r"[ \t]*\n")
    return re.compile("".join(parts))


def run_console(shell, block, corrections):
    """With `corrections` (a list), collects what to change on the page: first line, last line, the new lines."""
    commands = commands_of(block)
    for index, (number, command, expected) in enumerate(commands):
        output = shell.run(command)
        while expected and not expected[-1].strip():
            expected.pop()
        following = commands[index + 1][1] if index + 1 < len(commands) else ""
        if shell.status != 0 and following != "echo $?":
            block.fail(f"{command}\nexited with status {shell.status} and printed:\n{output}", number)
        printed = "".join(line.rstrip() + "\n" for line in output.rstrip().splitlines())
        if not pattern_of(expected).fullmatch(printed):
            if corrections is not None:
                first = block.line + number + command.count("\n")
                corrections.append((first, first + len(expected), printed.splitlines()))
                continue
            wanted = "\n".join(expected)
            block.fail(f"{command}\nthe page shows:\n{wanted}\nthe command printed:\n{output}", number)
        print(f"$ {command}\n{output.rstrip()}")


def environment_of(source, place, compiler):
    """Programs are found under the names that the pages use, in a folder that comes first on PATH."""
    build = os.path.abspath(os.environ["MUSTER_BUILD"]) if "MUSTER_BUILD" in os.environ else ""
    python = os.environ.get("MUSTER_TEST_PYTHON") or sys.executable
    programs = place / ".programs"
    programs.mkdir()

    def program(name, text):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    program("python", f'exec {shlex.quote(python)} "$@"')
    program("python3", f'exec {shlex.quote(python)} "$@"')
    if compiler:
        found = [shutil.which(word) or word for word in compiler]  # "c++" itself would find this program
        program("c++", f'exec {shlex.join(found)} "$@"')
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("MUSTER_", "PMI", "OMPI_", "SLURM_", "MASTER_", "TORCHELASTIC_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    search = [str(programs)]
    if build:
        search.append(f"{build}/tools")
        environment["PYTHONPATH"] = f"{build}/python"
        environment["PKG_CONFIG_PATH"] = f"{build}/meson-uninstalled"
        environment["LD_LIBRARY_PATH"] = f"{build}/src"
        environment["MUSTER_PROGRAM"] = f"{build}/tools/muster"
    environment["PATH"] = ":".join([*search, environment.get("PATH", "/usr/bin:/bin")])
    environment.update(SOURCE=str(source), PS1="", PS2="", NO_COLOR="1", LC_ALL="C.UTF-8", PYTHONDONTWRITEBYTECODE="1",
                       MUSTER_TIMEOUT="60", TMPDIR=str(place / ".tmp"))
    (place / ".tmp").mkdir()
    return environment


def run(source, page, compiler, corrections=None):
    blocks = blocks_of(source / page, page)
    place = pathlib.Path(tempfile.mkdtemp(prefix="muster-page-"))
    shell = None
    counts = {"commands": 0, "files": 0, "valid": 0, "not run": 0}
    try:
        environment = environment_of(source, place, compiler)
        work = place / "source"  # a reader begins in the root of the source tree
        work.mkdir()
        for name in ("examples", "tests"):
            (work / name).symlink_to(source / name)
        shell = Shell(work, environment)
        for block in blocks:
            left_out = None
            for kind, text in block.notes:
                if kind == "setup":
                    output = shell.run(text)
                    if shell.status != 0:
                        block.fail(f"setup: {text}\nexited with status {shell.status} and printed:\n{output}")
                if kind == "not run":
                    left_out = text
            if left_out is not None:
                counts["not run"] += 1
                print(f"{page}:{block.line}: not run: {left_out}")
            elif block.file:
                path = shell.directory() / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
                counts["files"] += 1
            elif block.language == "console":
                run_console(shell, block, corrections)
                counts["commands"] += len(commands_of(block))
            elif block.language == "python":
                try:
                    ast.parse(block.text)
                except SyntaxError as error:
                    block.fail(f"this is not Python: {error}", error.lineno or 0)
                counts["valid"] += 1
    finally:
        if shell:
            shell.end()
            shell.process.wait()
        shutil.rmtree(place, ignore_errors=True)
    print(f"{page}: {counts['commands']} commands ran, {counts['files']} files were saved, {counts['valid']} Python "
          f"blocks are valid, {counts['not run']} blocks were not run")
    return 0


# The C++ blocks that a page does not save are compiled together: programs in namespaces, the others as functions.


def fragments(source, compiler):
    includes, bodies, count = [], [], 0
    for path in pages_of(source):
        page = str(path.relative_to(source))
        for block in blocks_of(path, page):
            if block.language != "cpp" or block.file or any(kind == "not run" for kind, _ in block.notes):
                continue
            count += 1
            program = "int main(" in block.text
            function = f"void block_{count}();\nvoid block_{count}() {{"
            bodies.append(f"namespace block_{count} {{" if program else function)
            bodies.append(f'#line {block.line + 1} "{page}"')
            for line in block.lines:
                includes.extend([line] if line.startswith("#include") else [])
                bodies.append("" if line.startswith("#include") else line)
            bodies.append("}")
    names = pathlib.Path(__file__).with_name("names.hpp")
    text = "\n".join([*dict.fromkeys(includes), f'#include "{names}"', *bodies, ""])
    done = subprocess.run([*compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused",
                           "-x", "c++", "-"], input=text, text=True, cwd=source)
    if done.returncode != 0:
        raise Failure("the C++ blocks of the pages do not compile")
    print(f"{count} C++ blocks compile")
    return 0 if count else 1


# Links


def pages_of(source):
    pages = [source / "README.md", source / "CONTRIBUTING.md", source / "CHANGELOG.md"]
    pages += sorted((source / "docs").rglob("*.md"))
    return [page for page in pages if page.exists()]


def prose_of(path):
    """The lines of a page outside of code, with their numbers."""
    ending = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if ending is None and fence:
            ending = fence[2]
        elif fence and fence[2] == ending and not fence[3].strip():
            ending = None
        elif ending is None and not line.startswith("    "):
            yield number, line


def anchors_of(path):
    """The anchors that GitHub makes of the headings."""
    anchors, seen = set(), {}
    for _, line in prose_of(path):
        for name in re.findall(r'<a (?:id|name)="([^"]+)"', line):
            anchors.add(name)
        if heading := re.match(r"^#{1,6} +(.*?)[ #]*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            anchor = "".join(c if c in "-_" or unicodedata.category(c)[0] in "LN" else "-" if c == " " else ""
                             for c in text)
            times = seen.get(anchor, 0)
            seen[anchor] = times + 1
            anchors.add(f"{anchor}-{times}" if times else anchor)
    return anchors


def links_of(path):
    for number, line in prose_of(path):
        text = re.sub(r"(`+).*?\1", "", re.sub(r"\[`[^`]*`\]", "[]", line))
        for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text):
            yield number, target
        for target in re.findall(r'(?:src|href)="([^"]+)"', text):
            yield number, target


def paths_of(path):
    """The paths of the source tree that a page has in backquotes, without the arguments of commands."""
    for number, line in prose_of(path):
        for text in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            name = text.removeprefix("./").strip("<>").split(" ")[0]
            if re.match(r"(src|include|tools|tests)/", name) or re.fullmatch(r"muster/[\w/]+\.hpp", name):
                yield number, name


def is_in_tree(source, name):
    pattern = name.replace("NAME", "*")
    return any(any(folder.glob(pattern)) for folder in (source, source / "include"))


def links(source):
    problems, reached, anchors, count = [], {}, {}, 0
    pages = pages_of(source)
    for page in pages:
        name = page.relative_to(source)
        reached[page.resolve()] = set()
        for number, link in links_of(page):
            if re.match(r"[a-z][a-z+.-]*:", link):
                continue
            count += 1
            file, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (page.parent / file).resolve() if file else page.resolve()
            if not target.exists():
                problems.append(f"{name}:{number}: {link}: this file does not exist")
                continue
            if not target.is_relative_to(source.resolve()):
                problems.append(f"{name}:{number}: {link}: this file is outside of the tree")
            if target.suffix == ".md":
                reached[page.resolve()].add(target)
                if anchor and anchor not in anchors.setdefault(target, anchors_of(target)):
                    problems.append(f"{name}:{number}: {link}: this page has no such heading")
        for number, path in paths_of(page):
            count += 1
            if not is_in_tree(source, path):
                problems.append(f"{name}:{number}: `{path}`: the tree has no such file or directory")
    index = (source / "docs" / "README.md").resolve()
    found, open_pages = {index}, [index]
    while open_pages:
        for target in reached.get(open_pages.pop(), ()):
            if target not in found:
                found.add(target)
                open_pages.append(target)
    for page in pages:
        if page.is_relative_to(source / "docs") and page.resolve() not in found:
            problems.append(f"{page.relative_to(source)}: no link leads here from docs/README.md")
    for problem in problems:
        print(problem)
    print(f"{count} links and paths of {len(pages)} pages were checked, {len(problems)} problems were found")
    return 1 if problems else 0


def main():
    task, source = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    try:
        if task == "links":
            return links(source)
        if task == "fragments":
            return fragments(source, sys.argv[3:])
        if task == "run":
            return run(source, sys.argv[3], sys.argv[4:])
        if task == "update":
            corrections = []
            status = run(source, sys.argv[3], sys.argv[4:], corrections)
            lines = (source / sys.argv[3]).read_text().splitlines()
            for first, last, text in reversed(corrections):
                lines[first:last] = text
            (source / sys.argv[3]).write_text("\n".join(lines) + "\n")
            print(f"{len(corrections)} outputs were corrected")
            return status
    except Failure as failure:
        print(failure)
        return 1
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
