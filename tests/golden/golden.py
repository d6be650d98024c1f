#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the output of the program with the files of tests/data/golden: in a terminal of 80 columns and in a pipe.

    golden.py MUSTER MAKE_INPUTS GOLDEN_DIRECTORY DOCUMENT

With MUSTER_ACCEPT_GOLDEN=1 the files are written again: review the difference before you commit it. The script also compares
the keys of all JSON output with the tables of the document.
"""
import difflib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time

# name of the file: command lines whose outputs it has
CASES = {
    "ls": ["ls shared", "ls jobs", "ls state.h5", "ls model --json", "ls shared --json", "ls shared --names-only",
           "ls state.h5 --sort size --larger-than 100", "ls state.h5 --select layers.* --select odd --exclude *.bias",
           "ls shared --sort size", "ls state.h5 --sort age", "ls nowhere", "ls plain", "ls newer"],
    "show": ["show state.h5", "show state.h5 --tree --ascii", "show state.h5 --table --sort size --select layers.*",
             "show compressed.h5", "show model", "show model --expand --tree", "show shared", "show shared --rank 1",
             "show jobs", "show jobs --job-id 3031", "show jobs --job-id ff", "show shared --rank 7",
             "show shared --step 9", "show hostile.h5", "show torn.h5", "show newer", "show plain",
             "show compressed.h5 --json", "show model --json --select *norm*"],
    "show_config": ["show state.h5 --config", "show state.h5 --config layers.0", "show state.h5 --config layers.0.bias",
                    "show state.h5 --config layers.7", "show state.h5 --config nothing",
                    "show shared --config rank0.scale", "show model --config"],
    "show_issues": ["show state.h5 --check", "show hostile.h5 --check", "show shared --check",
                    "show model --check", "show hostile.h5 --check --json"],
    "stats": ["stats state.h5", "stats state.h5 --select embed.weight", "stats state.h5 --select odd --bins 4",
              "stats state.h5 --select codes", "stats state.h5 --select counts --ascii",
              "stats state.h5 --select layers.*.norm.weight --histogram --bins 3", "stats compressed.h5 --sort size",
              "stats state.h5 --only-dtype F32", "stats state.h5 --select nothing",
              "stats state.h5 --select odd --json --bins 2", "stats state.h5 embed.weight"],
    "cat": ["cat state.h5 layers.0.norm.weight", "cat state.h5 embed.weight[:2,::4]", "cat state.h5 embed.weight",
            "cat state.h5 embed.weight[-1,-1] amax bits codes counts odd rotation empty",
            "cat state.h5 embed.weight[...,0]", "cat state.h5 embed.weight[40]", "cat state.h5 embed.weight[0,0,0]",
            "cat state.h5 embed.weight[a]", "cat state.h5 embed.weights", "cat state.h5 amax[0]",
            "cat state.h5 rotation odd codes[::2] --json", "cat shared rank1/embed.weight[0]"],
    "diff": ["diff state.h5 state.h5", "diff state.h5 other.h5", "diff state.h5 other.h5 --json",
             "diff model state.h5", "diff jobs jobs --job-id 1011", "diff shared jobs", "diff state.h5 nowhere.h5", "diff state.h5 other.h5 --sort relative"],
    "fingerprint": ["fingerprint state.h5", "fingerprint model --select *norm*", "fingerprint jobs --json",
                    "fingerprint state.h5 --check state.fingerprint", "fingerprint other.h5 --check state.fingerprint",
                    "fingerprint other.h5 --check state.fingerprint --json",
                    "fingerprint other.h5 --check state.fingerprint --select layers.* --exclude *.norm.*",
                    "fingerprint state.h5 --check plain", "fingerprint state.h5 --check torn.h5",
                    "fingerprint state.h5 --dtype bf16", "fingerprint hostile.h5", "fingerprint nowhere",
                    "fingerprint model --select nothing"],
    "verify": ["verify state.h5", "verify state.h5 compressed.h5 model", "verify torn.h5", "verify changed.h5", "verify shared",
               "verify shared --headers-only", "verify jobs --json", "verify state.h5 jobs --json",
               "verify shared --select layers.* --sort defect", "verify state.h5 --select nothing",
               "verify newer", "verify nowhere state.h5"],
    "gc": ["gc shared", "gc shared --stale-after 2d", "gc shared --stale-after 5d --json", "gc shared --stale-after old",
           "gc shared --sort size", "gc plain", "gc state.h5", "gc newer"],
    "convert": ["convert state.h5 new.safetensors", "convert new.safetensors back.h5 --compress zstd",
                "diff state.h5 back.h5", "show new.safetensors --config layers.1",
                "convert state.h5 new.safetensors", "convert state.h5 new.bin",
                "convert state.h5 other.safetensors --compress zstd", "convert state.h5 other.h5 --compress lz4",
                "convert model model.h5", "convert state.h5 ./state.h5 --force", "convert nowhere.h5 a.safetensors",
                "convert torn.h5 a.safetensors", "convert state.h5 new.safetensors --force"],
    "plan": ["plan show plan.json", "plan check plan.json model", "plan check plan.json plain_model --json",
             "plan check llama model", "plan check auto model", "plan show plan.json model", "plan check llama",
             "plan check plan.json model --select *norm* --sort name", "plan show lama",
             "plan print llama", "plan", "plan suggest model", "plan suggest model --json"],
    "versions": ["publish model versions --base plain_model --version 2", "publish nowhere versions --base model",
                 "publish model versions", "publish model versions --base model --full --full-every 2",
                 "publish model versions --base model --encoding add", "publish model versions --base model --keep-for old",
                 "pull versions copy --version 1.5", "pull plain copy", "pull nowhere copy --base model",
                 "log nowhere", "log plain", "log plain --verify"],
    "help": [c + " --help" for c in ("", "run", "ls", "show", "stats", "cat", "diff", "fingerprint", "verify", "convert", "shard",
                                     "export", "plan", "plan show", "plan check", "plan suggest", "publish", "pull", "log", "gc", "report", "trace",
                                     "status", "doctor", "completion", "man")] +
            ["", "nothing", "show", "completion fish", "show --selct x", "show a --sort date", "stats a --bins 0",
             "verify a --headers-only --write-checksums", "export a --jobs 3"],
    "man": ["man"],
}

# commands whose JSON keys the document must list
JSON_CASES = {
    "run": ["run -n 1 --logs logs --json -- true"],
    "ls": ["ls shared --json", "ls model --json"],
    "show": ["show state.h5 --json --check", "show hostile.h5 --json --check", "show model --json",
             "show shared --json"],
    "stats": ["stats state.h5 --json"],
    "cat": ["cat state.h5 embed.weight --json"],
    "diff": ["diff state.h5 other.h5 --json", "diff model plain_model --json"],
    "fingerprint": ["fingerprint state.h5 --json", "fingerprint other.h5 --check state.fingerprint --json"],
    "verify": ["verify state.h5 --json", "verify changed.h5 --json", "verify shared state.h5 --json",
               "verify plain_model --write-checksums --json"],
    "gc": ["gc shared --json"],
    "convert": ["convert state.h5 for_keys.safetensors --json"],
    "shard": ["shard model --to 1 --plan same.json --out for_keys --json",
              "shard model --to 1 --plan same.json --dry-run --json"],
    "plan check": ["plan check plan.json plain_model --json"],
    "plan suggest": ["plan suggest model --json"],
    "publish": ["publish model weights --base model --json", "publish model weights --base model --full --json"],
    "pull": ["pull weights copy --base model --json"],
    "log": ["log weights --base model --local copy --verify --json"],
    "doctor": ["doctor shared --json"],
}


def skip(words):
    print("skipped: " + words)
    sys.exit(77)


def run_in_pipe(program, arguments, work, env):
    done = subprocess.run([program] + arguments, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=60)
    return done.returncode, done.stdout.decode("utf-8", "backslashreplace"), done.stderr.decode(
        "utf-8", "backslashreplace")


def run_in_terminal(program, arguments, work, env):
    """Only standard output is the terminal, so that errors are separate."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([program] + arguments, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=follower,
                               stderr=subprocess.PIPE)
    os.close(follower)
    output = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(leader)
    errors = process.stderr.read().decode("utf-8", "backslashreplace")
    return process.wait(timeout=60), output.replace(b"\r\n", b"\n").decode("utf-8", "backslashreplace"), errors


def normalised(text, work):
    text = text.replace(os.path.realpath(work), "WORK").replace(work, "WORK")
    text = re.sub(r'"(age_seconds|changed)": [\d.]+', r'"\1": 0', text)
    text = re.sub(r"\b\d+\.\d\d s\b", "0.00 s", text)
    # Terminal escapes become text, so that the golden files are text, too.
    return text.replace("\x1b", "\\e")


def transcript(run, program, lines, work, env):
    out = []
    for line in lines:
        status, output, errors = run(program, line.split(), work, env)
        if "\x1b" in output and run is run_in_pipe:
            raise SystemExit(f"FAILED: escapes in a pipe: muster {line}")
        if status == 2 and (output or errors.count("\n") != 1) and not line.startswith("verify nowhere"):
            raise SystemExit(f"FAILED: not one line on standard error: muster {line}: {output}{errors}")
        out.append(f"$ muster {line}\n{normalised(output, work)}")
        if errors:
            out.append("".join(f"! {error}\n" for error in normalised(errors, work).splitlines()))
        out.append(f"[{status}]\n\n")
    return "".join(out)


def age_everything(work):
    """Makes all files three days and two hours old, so that printed ages do not change."""
    then = time.time() - 74 * 3600
    for root, _, files in os.walk(work):
        for name in files:
            os.utime(os.path.join(root, name), (then, then))


def paths_of(value, before, maps, out):
    if isinstance(value, dict):
        for key, item in value.items():
            place = "*" if before in maps else key
            paths_of(item, f"{before}.{place}" if before else place, maps, out)
        if not value and before:
            out.add(before)
    elif isinstance(value, list):
        for item in value:
            paths_of(item, before + "[]" if not isinstance(item, list) else before, maps, out)
        if not value or not any(isinstance(item, (dict, list)) for item in value):
            out.discard(before + "[]")
            out.add(before)
    else:
        out.add(before)


def documented(document, command):
    """Returns the keys of the tables under "## muster COMMAND"."""
    with open(document, encoding="utf-8") as file:
        text = file.read()
    begin = text.find(f"\n## muster {command}\n")
    if begin < 0:
        return None
    section = re.split(r"\n##+ ", text[begin + 4:])[0]
    keys = set()
    for row in re.findall(r"^\| (`.*?) \|", section, re.M):
        keys.update(re.findall(r"`([^`]+)`", row))
    return keys


def check_keys(program, work, env, document):
    maps = {"metadata", "facts", "totals.dtypes"}
    bad = []
    with open(os.path.join(work, "same.json"), "w", encoding="utf-8") as file:
        file.write('{"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]}')
    for command, lines in JSON_CASES.items():
        keys = documented(document, command)
        if keys is None:
            bad.append(f"{document} has no section of muster {command}")
            continue
        seen = set()
        for line in lines:
            _, output, errors = run_in_pipe(program, line.split(), work, env)
            if not output:
                bad.append(f"muster {line}: {errors}")
                continue
            value = json.loads(output)
            if isinstance(value.get("plan"), dict):
                value["plan"] = ""  # a plan has the keys of its own format
            if "reports" in value:
                for report in value["reports"]:
                    paths_of(report, "", maps, seen)
            else:
                paths_of(value, "", maps, seen)
        containers = {path for path in seen if any(other.startswith((path + ".", path + "[")) for other in seen)}
        for path in sorted(seen - containers - keys):
            bad.append(f"muster {command} --json: {path} is not in {document}")
        for path in sorted(keys - seen):
            bad.append(f"{document}: {path} is never in muster {command} --json")
    return bad


def main():
    program, make_inputs, golden, document = (os.path.abspath(path) for path in sys.argv[1:5])
    accept = os.environ.get("MUSTER_ACCEPT_GOLDEN") == "1"
    env = {key: value for key, value in os.environ.items()
           if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                          "MUSTER_JOB", "NO_COLOR", "MUSTER_FAULT", "LC_CTYPE")}
    env.update(LC_ALL="C.UTF-8", TERM="xterm-256color", COLUMNS="80")
    work = tempfile.mkdtemp(prefix="muster-golden-")
    failures = []
    try:
        for kind, run in (("pipe", run_in_pipe), ("terminal", run_in_terminal)):
            inside = os.path.join(work, kind)
            os.mkdir(inside)
            subprocess.run([make_inputs, inside], check=True)
            shutil.copytree(os.path.join(inside, "model"), os.path.join(inside, "plain_model"))
            with open(os.path.join(inside, "plain_model", "config.json"), "w", encoding="utf-8") as file:
                file.write("{}\n")
            with open(os.path.join(inside, "state.fingerprint"), "w", encoding="utf-8") as file:
                file.write(run_in_pipe(program, ["fingerprint", "state.h5"], inside, env)[1])
            age_everything(inside)
            for name, lines in CASES.items():
                if kind == "terminal" and name in ("help", "man"):
                    continue  # the same
                text = transcript(run, program, lines, inside, env)
                path = os.path.join(golden, f"{name}.{kind}.txt")
                if accept:
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(text)
                    continue
                try:
                    with open(path, encoding="utf-8") as file:
                        wanted = file.read()
                except FileNotFoundError:
                    wanted = ""
                if text != wanted:
                    failures.append(f"{name}.{kind}.txt")
                    sys.stdout.writelines(difflib.unified_diff(wanted.splitlines(True), text.splitlines(True), path,
                                                               "what is printed"))
            if kind == "pipe":
                failures += check_keys(program, inside, env, document)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for failure in failures:
        print("FAILED: " + failure)
    if failures:
        print("MUSTER_ACCEPT_GOLDEN=1 takes what is printed now, where that is meant")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        skip("golden.py MUSTER MAKE_INPUTS GOLDEN_DIRECTORY DOCUMENT")
    main()
