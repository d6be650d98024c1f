#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Workspaces and state files on the command line. A model is converted to a workspace and back, and files are converted
# in both directions. Errors are reported, failed commands change nothing, and some commands read only headers.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
source "$(dirname "$0")/cli.sh"

# sums: prints the contents of the directories, to check that nothing changed.
sums() { find . -path ./.log -prune -o -type f -print0 | sort -z | xargs -0 md5sum; }

"$demo" model --megabytes 3 > /dev/null || fail "no demo model"

# A model to a workspace and back, compressed and not.
says 0 "step 1" "$program" shard model --to tp=2,pp=2 --plan llama --workspace --out plain
says 0 "step 1" "$program" shard model --to 3 --plan llama --workspace --compress zstd --out packed
says 0 "4 ranks" "$program" ls plain
says 0 "step 1 complete on all ranks" "$program" ls packed
says 0 "good: " "$program" verify plain
says 0 "good: " "$program" verify packed plain
says 0 "same" "$program" diff model plain --plan auto
says 0 "same" "$program" diff plain packed --plan auto
for workspace in plain packed; do
  for writers in all rank0; do
    says 0 "written by rank" "$program" export $workspace --plan auto --writers $writers --out back
    says 0 "same" "$program" diff model back
    rm -r back
  done
done
says 0 "written by rank" "$program" export packed --plan auto --to 2 --out two
says 0 "same" "$program" diff model two --plan llama
says 0 "written by rank" "$program" run -n 2 -- "$program" export plain --plan auto --out jointly
says 0 "same" "$program" diff model jointly
says 0 '"dropped"' "$program" export plain --plan auto --dry-run --json
[ "$(ls -A plain | grep -c growing)" = 0 ] || fail "left behind: $(ls -A plain)"
before=$(sums)

# If a second job uses the workspace, commands do not guess which one is meant.
cp -r plain both
says 0 "job" "$program" shard model --to 1 --plan llama --workspace --out both
job=$("$program" ls both --json | grep '"job"' | sed 's/.*: "\(.*\)".*/\1/' | head -1)
says 2 "several jobs" "$program" show both
says 2 "several jobs" "$program" export both --plan auto --out nothing
says 0 "tensors" "$program" show both --job-id "${job:0:12}"
rm -r both

# Invalid requests: clear errors, and nothing changes.
mkdir other && echo text > other/notes.txt && echo text > file
says 2 "is not a Muster workspace" "$program" ls other
says 2 "is not a Muster workspace" "$program" shard model --to 2 --plan llama --workspace --out other
says 2 "does not exist" "$program" ls nowhere
says 2 "" "$program" shard model --to 2 --plan llama --workspace --out file
ln -s gone dangling
says 2 'a link to "gone", which does not exist' "$program" ls dangling
says 2 "" "$program" shard model --to 2 --plan llama --workspace --out dangling
rm -r other file dangling
says 2 "not a model" "$program" shard two --to 2 --plan llama --out x
says 2 "cannot be compressed" "$program" shard model --to 2 --plan llama --compress zstd --out x
says 2 "unknown compression" "$program" shard model --to 2 --plan llama --workspace --compress lz4 --out x
cp -r plain changed && echo '{}' > changed/config.json
says 2 "another" "$program" shard model --to 2 --plan llama --workspace --out changed
rm -r changed
says 2 "no complete state of rank 9" "$program" show plain --rank 9
says 2 "no complete state of step 7" "$program" show plain --step 7
says 2 "step 7" "$program" export plain --plan auto --step 7 --out x
state=$(ls plain/state-*-r0-*.h5)
says 2 "did you mean" "$program" cat "$state" model.embed_tokens.weigth
says 2 "out of range for dimension 0 of" "$program" cat "$state" 'model.embed_tokens.weight[99999999]'
says 2 "no tensor name" "$program" stats "$state" --select 'x.*'
[ "$(sums)" = "$before" ] || fail "something changed"

# Faults while states are written leave no file that looks like a state.
for fault in pwrite:ENOSPC:5 fsync:EIO:2 rename:EIO:2; do
  says 2 "" env MUSTER_FAULT=$fault "$program" shard model --to 3 --plan llama --workspace --out broken
  [ -z "$(ls broken 2> /dev/null | grep -v -e muster-workspace.json -e config.json -e tokenizer)" ] || fail "$fault: left: $(ls broken)"
  rm -rf broken
done

# States are written in the workspace, whichever file system has the current directory. The next run removes the
# unfinished files of a killed run.
elsewhere=$(mktemp -d /dev/shm/other-disk-XXXXXX) || exit 1
trap 'rm -rf "$work" "$elsewhere"' EXIT
(cd "$elsewhere" && "$program" shard "$work/model" --to 2 --plan llama --workspace --out "$work/far") > "$out" 2>&1 || fail "from elsewhere: $(cat "$out")"
says 0 "good: " "$program" verify far
(cd "$elsewhere" && exec "$program" shard "$work/model" --to 2 --plan llama --workspace --compress zstd:19 --out "$work/far") > "$out" 2>&1 &
victim=$!
until compgen -G "far/.growing-*" > /dev/null || ! kill -0 $victim; do :; done
kill -9 $victim
wait $victim 2> /dev/null
[ -z "$(ls -A "$elsewhere")" ] || fail "left elsewhere: $(ls -A "$elsewhere")"
says 0 "has ended" "$program" gc far
says 0 "step 1" "$program" shard model --to 2 --plan llama --workspace --out far
[ -z "$(ls -A far | grep growing)" ] || fail "left behind: $(ls -A far)"
rm -r far

# A truncated state, and a modified one.
cp -r plain torn
victim=$(ls torn/state-*-r1-*.h5)
flip "$victim" $(($(stat -c %s "$victim") / 2))
says 1 "checksum" "$program" verify torn
says 0 "good: " "$program" verify torn --headers-only
says 2 "checksum mismatch: data is corrupted" "$program" convert "$victim" torn.safetensors
says 2 "checksum mismatch: data is corrupted" "$program" convert "$victim" torn.h5
[ -e torn.safetensors ] || [ -e torn.h5 ] && fail "a refused conversion left a file"
truncate -s -1 "$victim"
says 1 "truncated state file" "$program" verify torn
says 0 "no complete state of rank 1" "$program" ls torn
says 2 "no step with complete states of all 4 ranks" "$program" export torn --plan auto --out x
says 1 "no complete state of rank 1" "$program" verify torn
rm -r torn

# A FIFO under a state's name is not a state, and no command waits for it.
cp -r plain pipe
mkfifo "pipe/$(basename "$(ls plain/state-*-r1-*.h5)" | sed s/-g1/-g2/)"
says 1 "has the name of a state, but is not one" timeout 20 "$program" verify pipe
says 0 "unknown files" timeout 20 "$program" ls pipe
says 0 "same" timeout 20 "$program" diff pipe plain
says 2 "not a regular file" timeout 20 "$program" show pipe/state-*-g2.h5
rm -r pipe

# Conversion in both directions.
first=$(ls model/*.safetensors | head -1)
says 0 "tensors" "$program" convert "$first" one.h5
says 0 "tensors" "$program" convert "$first" small.h5 --compress zstd:3
for level in gzip zstd: zstd:x zstd:0 zstd:3x zstd:23; do
  says 2 "compress $level: unknown compression" "$program" convert "$first" refused.h5 --compress $level
done
says 0 "tensors" "$program" convert small.h5 again.safetensors
cmp -s "$first" again.safetensors || says 0 "same" "$program" diff "$first" again.safetensors
says 0 "same" "$program" diff one.h5 "$first"
says 0 "same" "$program" diff one.h5 small.h5
says 0 "good: " "$program" verify one.h5 small.h5
[ "$(stat -c %s small.h5)" -lt "$(stat -c %s one.h5)" ] || fail "compression made it larger"
says 0 '"format": "pt"' "$program" show one.h5 --config
says 2 "--force" "$program" convert "$first" one.h5
says 0 "tensors" "$program" convert "$first" one.h5 --force
says 0 "tensors" "$program" convert "$state" state.safetensors
says 0 "tensors" "$program" convert state.safetensors state.h5
"$program" show "$state" --config > .log/a && "$program" show state.h5 --config > .log/b && cmp -s .log/a .log/b || fail "the config changed on its way"
for fault in pwrite:ENOSPC:2 fsync:EIO:1 rename:EIO:1; do
  for end in h5 safetensors; do
    says 2 "" env MUSTER_FAULT=$fault "$program" convert one.h5 broken.$end
    [ -z "$(ls -A | grep -v -e '^\.log$' | grep -e broken -e growing -e partial)" ] || fail "$fault: left: $(ls -A)"
  done
done

# A state rewritten by h5repack has a copied commit mark that does not match it: it is an ordinary HDF5 file, and not a
# state.
if command -v h5repack > /dev/null && h5repack "$state" repacked.h5 2> /dev/null; then
  says 0 "model.embed_tokens.weight" "$program" ls repacked.h5
  says 0 "incomplete: " "$program" show repacked.h5 --check
  says 1 "file: " "$program" verify repacked.h5
  mkdir repacked && cp plain/* repacked/ && mv repacked.h5 "repacked/$(basename "$state")"
  says 2 "no step with complete states of all" "$program" export repacked --plan auto --out x
  rm -r repacked
else
  echo "h5repack is not there: copies that it makes are not looked at"
fi

# Clean-up.
echo rest > plain/.growing-0123456789abcdef@elsewhere,0123456789abcdef,77,12345,4026531836
says 0 "nothing to delete" "$program" gc plain
says 0 "keep" "$program" gc plain --yes
"$program" doctor plain | grep "ended processes" && fail "the doctor finds a file of an ended process"
boot=$(tr -d - < /proc/sys/kernel/random/boot_id | cut -c 1-16) ended=$(sh -c 'echo $$')
dead=plain/.growing-0123456789abcdee@$(uname -n),$boot,$ended,1,$(stat -Lc %i /proc/self/ns/pid)
echo rest > "$dead"
says 0 "delete 1 file of ended processes: muster gc --yes" "$program" doctor plain
says 0 " deleted" "$program" gc plain --yes
[ ! -e "$dead" ] || fail "$dead is there still"
says 0 "would be deleted" "$program" gc plain --stale-after 0s
[ "$(ls plain/state-*.h5 | wc -l)" = 4 ] || fail "a dry run removed something"
says 0 " deleted" "$program" gc plain --stale-after 0s --yes
[ "$(ls plain/state-*.h5 2> /dev/null | wc -l)" = 0 ] || fail "states are there still: $(ls plain)"
says 0 "0 jobs" "$program" ls plain
says 2 '--stale-after: "soon" is not a duration' "$program" gc plain --stale-after soon

# The doctor reports no problem on a machine that can run these tests, and leaves the workspace unchanged.
there=$(ls -A packed)
says 0 "file system" "$program" doctor packed
[ "$(ls -A packed)" = "$there" ] || fail "the doctor left something: $(ls -A packed)"
says 0 '"healthy": true' "$program" doctor packed --json
case $(awk '/^NSpid:/ { print NF - 1 }' /proc/self/status) in
  "") nested="unknown process namespace" ;;
  1) nested="in the process namespace of the machine" ;;
  *) nested="process namespaces deep" ;;
esac
says 0 "$nested" "$program" doctor packed
says 1 "bad" "$program" doctor nowhere
# A library that exists and cannot be loaded is not the same as a missing one.
mkdir broken
library=$(ldd "$program" | awk '/libmuster.so/ { print $3 }')
cp -L "$library" broken/ || fail "no copy of $library"
for name in cuda mpi; do
  echo "not a library" > "broken/libmuster-$name.so.$("$program" --version | cut -d ' ' -f 2)"
done
LD_LIBRARY_PATH=$PWD/broken "$program" doctor > .log/doctor
grep -qE "^warning +CUDA .*cannot be loaded: .*/broken/libmuster-cuda" .log/doctor || fail "no cause: $(cat .log/doctor)"

# Completion covers every command, its options and paths.
"$program" completion bash > .log/completion && bash -n .log/completion || fail "the completion of bash is no script"
completed=$(bash -c 'source "$1"; COMP_WORDS=(muster show --so); COMP_CWORD=2; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster show --sort n); COMP_CWORD=3; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster plan check --fi); COMP_CWORD=3; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster plan s); COMP_CWORD=2; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster show --plan gpt-n); COMP_CWORD=3; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster export --plan mo); COMP_CWORD=3; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster shard --compress zs); COMP_CWORD=3; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"
  COMP_WORDS=(muster verify mod); COMP_CWORD=2; COMPREPLY=(); _muster; echo "${COMPREPLY[*]}"' bash .log/completion 2> /dev/null)
[ "$completed" = "--sort"$'\n'"name"$'\n'"--file-pattern"$'\n'"show suggest"$'\n'"gpt-neox"$'\n'"model modernbert moe"$'\n'"zstd"$'\n'"model" ] || fail "completion: $completed"
"$program" completion zsh > .log/_muster || fail "no completion of zsh"
if command -v zsh > /dev/null; then
  zsh -n .log/_muster || fail "the completion of zsh is no script"
fi
"$program" man > .log/muster.1
if command -v mandoc > /dev/null; then
  mandoc -T lint -W error .log/muster.1 || fail "the manual page is wrong"
fi
if command -v man > /dev/null; then
  [ -z "$(LC_ALL=C.UTF-8 man --warnings -E UTF-8 -l -Tutf8 -Z .log/muster.1 2>&1 > /dev/null)" ] || fail "the manual page has warnings"
fi
commands=$("$program" completion bash | sed -n "s/.*compgen -W '\(run[^']*\)'.*/\1/p" | tr ' ' '\n' | grep -v '^-')
[ "$(wc -w <<< "$commands")" -ge 14 ] || fail "commands: $commands"
for command in $commands; do
  [[ $("$program" "$command" --help) == *"muster $command"* ]] || fail "$command --help has no example"
  grep -qE "^\.SS $command( |$)" .log/muster.1 || fail "the manual page lacks $command"
  [ "$(grep -cE "^ +('$command:|$command\))" .log/_muster)" -ge 2 ] || fail "the completion of zsh lacks $command"
done

# Only headers are read: few reads, whatever the size of the file.
if command -v strace > /dev/null && strace -o .log/trace true 2> /dev/null; then
  strace -f -y -e trace=pread64,read,preadv,readv -o .log/trace "$program" show one.h5 > /dev/null
  reads=$(grep -c "one\.h5" .log/trace)
  [ "$reads" -le 8 ] || fail "show read the file $reads times"
  strace -f -y -e trace=pread64,read,preadv,readv -o .log/trace "$program" ls one.h5 > /dev/null
  reads=$(grep -c "one\.h5" .log/trace)
  [ "$reads" -le 8 ] || fail "ls read the file $reads times"
else
  echo "strace is not there: reads are not counted"
fi

finish
