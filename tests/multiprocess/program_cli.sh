#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The program and its environment: standard streams that are closed, full or not read, terminals of various widths,
# names with control characters, and the variables of a job whose other ranks never arrive.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
source "$(dirname "$0")/cli.sh"

"$demo" model --megabytes 3 > /dev/null || fail "no demo model"
"$program" shard model --to 2 --plan llama --out shards > /dev/null || fail "shard"
same() { "$program" diff model "$1" > /dev/null || fail "$1 is not the model"; }

# A rank of a job whose other ranks never call it. It waits in the background of the tests below.
job="env RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MUSTER_JOB=none"
MUSTER_TIMEOUT=7 $job "$program" export shards --plan llama --out waiting > .log/waiting 2>&1 &
waiting=$!
says 0 "merged into" $job "$program" export shards --plan llama --standalone -j 2 --out alone
says 0 "merged into" env MUSTER_STANDALONE=1 $job "$program" export shards --plan llama -j 2 --out alone_too
grep -q "^skipped" "$out" && fail "skipped files that are not there: $(cat "$out")"
same alone
same alone_too
says 2 "--standalone" $job "$program" export shards --plan llama -j 2 --out new
says 2 "MUSTER_STANDALONE" env MUSTER_STANDALONE=yes "$program" export shards --plan llama --out new
says 0 "split into" $job "$program" shard model --to 2 --plan llama --out shards_too
says 0 "good" $job "$program" verify shards_too
says 0 "same" $job "$program" diff shards_too model --plan llama
says 2 "the environment variable MUSTER_ALONE is not supported: set MUSTER_STANDALONE instead" \
  env MUSTER_ALONE=1 "$program" export shards --plan llama --out new
says 0 "unset" env MUSTER_STANDALONE=1 "$program" run -n 2 -- sh -c 'echo ${MUSTER_STANDALONE-unset}'

# Closed streams: opened files do not get their descriptor numbers, and the exit status reports the loss.
for closed in '<&-' '2>&-' '<&- 2>&-' '>&-' '>&- 2>&-' '<&- >&- 2>&-'; do
  eval '"$program" export shards --plan llama --force --out closed > "$out" 2> "$err" '"$closed"
  status=$?
  case $closed in *'>&- '* | '>&-') wanted=3 ;; *) wanted=0 ;; esac
  [ $status = $wanted ] || fail "status $status of export $closed"
  same closed
done
"$program" export shards --plan llama --force --out closed 2> "$err" >&-
grep -q "muster export: error: finished successfully, .*Bad file descriptor" "$err" || fail "words of a closed output: $(cat "$err")"

# full STATUS COMMAND...: runs COMMAND with its output on a full device, and checks the exit status.
full() {
  local wanted=$1 status
  shift
  "$@" > /dev/full 2> "$err"
  status=$?
  [ $status = "$wanted" ] || fail "status $status, not $wanted, with a full output: $*"
  [ "$(grep -c "writing to standard output: No space left on device (ENOSPC)" "$err")" = 1 ] && [ "$(wc -l < "$err")" = 1 ] ||
    fail "a full output: $*: $(cat "$err")"
}
full 3 "$program" export shards --plan llama --out full -j 1
full 3 "$program" export shards --plan llama --out full_too -j 2
full 3 "$program" shard model --to 2 --plan llama --out full_shards
full 3 "$program" verify --write-checksums full
full 3 "$program" convert model/model-00001-of-*.safetensors full.h5
same full
same full_too
for command in "verify model" "show model" "show model --json" "ls model" "diff model full" "export shards --plan llama --dry-run" \
  doctor man "completion bash" --help --version "show --help"; do
  full 2 "$program" $command
done

# A reader that closes the pipe early causes no message.
"$program" cat model 'model.embed_tokens.weight' --full 2> "$err" | head -c 10 > /dev/null
[ "${PIPESTATUS[0]}" = 141 ] && [ ! -s "$err" ] || fail "a closed pipe: ${PIPESTATUS[0]}: $(cat "$err")"
(trap '' PIPE; "$program" cat model 'model.embed_tokens.weight' --full 2> "$err"; echo $? > .log/status) | head -c 10 > /dev/null
[ "$(cat .log/status)" = 2 ] && grep -q "Broken pipe" "$err" || fail "a closed pipe, SIGPIPE ignored: $(cat "$err")"

# Names and texts with control characters, in errors, logs and reports.
hostile=$(printf 'a\033[31m\302\233\342\200\256b\\')
safe='a\x1b[31m\u009b\u202eb\'
printf 'no header' > "$hostile"
for command in "show" "ls" "stats" "cat x" "diff model" "verify" "convert" "gc" "shard --to 2 --plan llama --out new" \
  "export --plan llama --out new" "verify --write-checksums" "show --select x model --plan" "run -n 1 --"; do
  for path in "$hostile" "$hostile.not"; do
    "$program" $command "$path" > "$out" 2>&1
    cat "$out" >> .log/all
  done
done
"$program" "$hostile" >> .log/all 2>&1
"$program" show "$hostile" model >> .log/all 2>&1
LC_ALL=C grep -q -e $'\033' -e $'\302\233' -e $'\342\200\256' .log/all && fail "raw escapes: $(cat -v .log/all)"
grep -qF '"'"$safe"'\.not": does not exist' .log/all || fail "not \"$safe.not\": does not exist: $(cat -v .log/all)"
"$program" verify "$hostile" > "$out"
grep -qF '"'"$safe"'\"' "$out" || fail "escaped otherwise than in errors: $(cat -v "$out")"

# Missing files, and files that are not read.
says 2 'muster: error: unknown command "shwo"; did you mean "show"? Run muster --help.' "$program" shwo model
says 2 'muster show: error: missing PATH. Run muster show --help.' "$program" show
says 2 'muster shard: error: missing --to LAYOUT. Run' "$program" shard model --plan llama --out new
says 2 'muster show: error: unknown option "--selct"; did you mean "--select"?' "$program" show model --selct x
says 2 'muster plan: error: missing COMMAND.' "$program" plan
says 2 'muster plan: error: unknown command "chek"; did you mean "check"?' "$program" plan chek llama model
says 2 'did you mean "llama"?' "$program" plan show lama
says 2 'did you mean "model.norm.weight"?' "$program" cat model model.norm.weigt
says 2 'no tensor name matches "nothing"' "$program" show model --select nothing
says 2 'no tensor name matches "nothing"' "$program" show model --select nothing --json
says 2 'no tensor name matches "nothing"' "$program" stats model --select nothing
python3 - << 'END' || fail "no files of many dimensions"
import json, struct
for name, shape in (("ones", [1] * 30000), ("four", [1] * 15000 + [4] + [1] * 15000)):
    data = bytes(range(4 * (4 if name == "four" else 1)))
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    open(name + ".safetensors", "wb").write(struct.pack("<Q", len(header)) + header + data)
    open(name, "wb").write(data)
END
for name in ones four; do
  for options in "" --json --full; do
    says 2 "dimensions; at most 64 are printed. Pass --raw" "$program" cat $name.safetensors x $options
  done
  "$program" cat $name.safetensors x --raw | cmp - $name || fail "the bytes of $name"
  "$program" cat $name.safetensors 'x[0, ...]' --raw | cmp - $name || fail "the bytes of a slice of $name"
  for command in "show" "show --tree" "show --json" "show --check" "stats" "verify" "ls" "diff $name.safetensors"; do
    "$program" $command $name.safetensors > /dev/null || fail "$command of $name"
  done
done

# Terminals: lines fit the width, also progress lines, and each error has its own line.
python3 - "$program" << 'END' || fail "terminals"
import fcntl, os, pty, select, struct, subprocess, sys, termios
def seen(columns, stream, arguments, **variables):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(sys.argv[1:] + arguments, env=os.environ | {"LC_ALL": "C", "TERM": "dumb"} | variables,
                               stdin=subprocess.DEVNULL, **{"stdout": subprocess.DEVNULL, stream: follower})
    text = b""
    while True:
        is_over = process.poll() is not None
        if select.select([leader], [], [], 0 if is_over else 0.05)[0]:
            text += os.read(leader, 65536)
        elif is_over:
            break
    os.close(leader)
    os.close(follower)
    return process.wait(), text.decode().replace("\r\n", "\n")
for columns in (20, 40, 60, 80):
    status, text = seen(columns, "stderr", ["stats", "model"])
    pieces = text.split("\r\x1b[K")
    assert status == 0 and len(pieces) > 1 and pieces[-1] == "", (status, text)
    assert all(len(piece) < columns for piece in pieces), (columns, text)
    assert any("%" in piece for piece in pieces), text
    assert columns < 60 or any("B/s  " in piece and " left" in piece for piece in pieces), text
first = sorted(name for name in os.listdir("model") if name.endswith(".safetensors"))[0]
status, text = seen(80, "stderr", ["convert", "model/" + first, "new.h5"], MUSTER_FAULT="pwrite:EIO:5")
assert status == 2 and "\r\x1b[Kmuster convert: error: " in text and text.endswith("\n"), (status, text)
names = subprocess.run(sys.argv[1:] + ["ls", "model"], capture_output=True, text=True).stdout.split()
for arguments in (["stats", "model"], ["export", "shards", "--plan", "llama", "--dry-run"]):
    status, text = seen(80, "stdout", arguments)
    assert status == 0 and all(len(line) <= 80 for line in text.splitlines()), text
    first = [line.split()[0] for line in text.splitlines()[1:] if line[:1] not in ("", " ")][:len(names)]
    assert len(set(first)) == len(names), text
wide = subprocess.run(sys.argv[1:] + ["stats", "model", "--width", "0"], capture_output=True, text=True).stdout
assert all(any(line.startswith(name + " ") for line in wide.splitlines()) for name in names), wide
END

wait $waiting
[ $? = 2 ] || fail "the status of a rank whose job does not come"
grep -q "^muster export: note: this process is a rank of a job (RANK=0, WORLD_SIZE=2), and has waited 5 s .* --standalone, or set MUSTER_STANDALONE=1" .log/waiting ||
  fail "words of a rank whose job does not come: $(cat .log/waiting)"
[ "$(wc -l < .log/waiting)" = 2 ] && [ ! -e waiting ] || fail "a rank whose job does not come: $(cat .log/waiting)"

finish
