#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Errors that a user meets. Every invalid input of shard and export ends with status 2 and one line on standard error
# with the remedy. No file remains. The commands run alone and as ranks of a job.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
source "$(dirname "$0")/cli.sh"

# refused WORDS COMMAND...: status 2, one line with WORDS, no new names in the directory.
refused() {
  local words=$1 status before
  shift
  before=$(ls -A)
  "$@" > "$out" 2> "$err"
  status=$?
  [ "$status" = 2 ] || fail "status $status, not 2: $*"
  # The launcher adds its own line about the failed rank, which is not from export.
  [ "$(grep -cv '^muster run: ' "$err")" = 1 ] || fail "not one line: $*: $(cat "$err")"
  grep -qF -- "$words" "$err" || fail "no \"$words\": $*: $(cat "$err")"
  [ -s "$out" ] && fail "words on standard output: $*"
  [ "$(ls -A)" = "$before" ] || fail "left behind by $*: $(ls -A)"
}
"$demo" model --megabytes 3 > /dev/null || fail "no demo model"
"$program" shard model --to 4 --plan llama --out shards > /dev/null || fail "shard"
"$program" export shards --plan llama --out alone > /dev/null || fail "export alone"
"$program" run -n 4 -- "$program" export shards --plan llama --out job --max-shard-size 1MB > /dev/null || fail "export as a job"
for copy in alone job; do cmp -s model/config.json $copy/config.json || fail "config.json of $copy"; done
[ -f alone/model.safetensors ] && [ -f job/model.safetensors.index.json ] || fail "files of the exports"
"$program" diff model alone > /dev/null || fail "alone differs"
"$program" diff model job > /dev/null || fail "job differs"

refused "--force" "$program" shard model --to 4 --plan llama --out shards
refused "--force" "$program" export shards --plan llama --out alone
refused "--force" "$program" run -n 4 -- "$program" export shards --plan llama --out alone
refused "is part of the source and cannot be the output" "$program" export shards --plan llama --out shards --force
refused "bert, falcon, gpt, " "$program" shard model --to 4 --plan lama --out new
refused "bert, falcon, gpt, " "$program" export shards --plan lama --out new
refused "no rule matches" "$program" shard model --to 4 --plan bert --out new
refused "no rule matches" "$program" export shards --plan bert --out new
refused "no rule matches" "$program" run -n 4 -- "$program" export shards --plan bert --out new
"$program" run -n 3 -- "$program" export shards --plan llama --out three > /dev/null || fail "3 ranks for 4 shards"
"$program" diff model three > /dev/null || fail "three differs"
mkdir empty
refused "no shards" "$program" export empty --plan llama --out new
refused "nowhere" "$program" shard nowhere --to 4 --plan llama --out new
refused "nowhere" "$program" export nowhere --plan llama --out new
refused "Make it first" "$program" export shards --plan llama --out no/new
refused 'layout "0"' "$program" shard model --to 0 --plan llama --out new

# A model is written again. Config and tokenizer come from a base. Ranks of another program are converted in both
# directions.
"$program" export model --max-shard-size 1MB --out anew > /dev/null || fail "export of a model"
"$program" diff model anew > /dev/null || fail "anew differs"
[ -f anew/model.safetensors.index.json ] || fail "anew is one file"
"$program" shard model --to tp=2,pp=2 --plan megatron --out megatron > /dev/null || fail "shard for megatron"
"$program" diff model megatron > /dev/null || fail "megatron differs"
rm megatron/config.json
refused "\"num_attention_heads\" of config.json is needed, but config.json does not exist" "$program" export megatron --out new
"$program" run -n 3 -- "$program" export megatron --base-model model --out based > /dev/null || fail "export with a base"
"$program" diff model based > /dev/null || fail "based differs"
cmp -s model/config.json based/config.json || fail "config.json of based"
"$program" run -n 3 -- "$program" export megatron --base-model model --to 3 --to-plan llama --out anew3 > "$out" || fail "ranks cut anew"
grep -q "the shards have the plan \"llama\"" "$out" || fail "no note of the plan: $(cat "$out")"
"$program" export anew3 --out whole3 > /dev/null && "$program" diff model whole3 > /dev/null || fail "anew3 differs"
refused "muster shard megatron --plan PLAN --to-plan vllm" "$program" export megatron --base-model model --to 2 --to-plan vllm --out new
"$program" shard megatron --plan megatron --base-model model --to-plan vllm --to 2 --out anew2 > /dev/null || fail "ranks for vllm"
"$program" diff model anew2 > /dev/null || fail "anew2 differs"
refused "--to-plan needs a layout" "$program" export megatron --base-model model --to-plan llama --out new
refused "no tensor matches" "$program" export shards --plan llama --dtype F16 --select nothing --out new
"$program" export shards --plan llama --dtype F32 --select '*norm*' --out norms > "$out" || fail "export of some"
grep -q "note: config.json now has the dtype float32" "$out" || fail "no note of the dtype: $(cat "$out")"
"$program" plan suggest model > "$out" 2> "$err" || fail "plan suggest"
grep -q '"extends": "llama"' "$out" && grep -q "note: uncertain: " "$err" || fail "plan suggest said: $(cat "$out" "$err")"

# Shards store their plan and report a contradiction. Third-party shards do not.
"$program" shard model --to 6 --plan auto --dry-run > "$out" 2> "$err" || fail "shard --dry-run"
grep -q "would be split into 6 shards" "$out" || fail "shard --dry-run said: $(cat "$out")"
grep -q "^note: .*the number of ranks does not divide the number of heads" "$out" || fail "no note of the heads: $(cat "$out")"
refused "--out is required" "$program" shard model --to 6 --plan auto
refused "has 16 tensor-parallel ranks, and the model has 12 attention heads" "$program" shard model --to 16 --plan auto --dry-run
"$program" export shards --out remembered > "$out" || fail "export without --plan"
grep "^note" "$out" && fail "a note without need"
"$program" diff model remembered > /dev/null || fail "remembered differs"
"$program" diff model shards > /dev/null || fail "shards without --plan differ"
mkdir foreign
python3 - << 'END' || fail "shards without metadata"
import json, struct
for rank in range(4):
    data = open(f"shards/rank-0000{rank}-of-00004.safetensors", "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    del header["__metadata__"]
    text = json.dumps(header).encode()
    open(f"foreign/rank-0000{rank}-of-00004.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + data[8 + length:])
END
refused "do not record their plan" "$program" export foreign --out new
refused "is missing in config.json" "$program" export foreign --plan llama --out new
"$program" export foreign --plan llama --base-model model --out elsewhere > "$out" || fail "export of shards from elsewhere"
"$program" diff model elsewhere > /dev/null || fail "elsewhere differs"

printf '{"muster_plan": 1,\n "rules": [}' > broken.json
refused "line 2" "$program" export shards --plan broken.json --out new
echo '{"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]}' > same.json
refused "have different values" "$program" export foreign --plan same.json --out new
refused "contradicts its config.json" "$program" export shards --plan same.json --out new
echo '{"muster_plan": 1, "rules": [{"match": "*", "action": "concat", "dim": 1}]}' > dim.json
refused "dimension 1 is out of range" "$program" shard model --to 4 --plan dim.json --out new
echo '{"muster_plan": 1, "rules": [{"match": "*", "action": "first"}]}' > first.json
refused "not invertible" "$program" shard model --to 4 --plan first.json --out new

# The list of output tensors, without writing a byte, and the same list beside an export.
before=$(ls -A)
"$program" export shards --plan auto --dry-run > .log/table || fail "--dry-run"
grep -q "model.layers.0.self_attn.o_proj.weight .*concat .*ranks 0-3 BF16" .log/table || fail "no o_proj in: $(head -5 .log/table)"
tail -1 .log/table | grep -q "tensors of 4 ranks .* merged into" || fail "no sums in the table"
grep -q "^would write .* of memory" .log/table || fail "no forecast in the table"
"$program" export shards --plan auto --dry-run --json > .log/plan.json || fail "--dry-run --json"
[ "$(ls -A)" = "$before" ] || fail "--dry-run left something"
"$program" export shards --plan auto --out counted --report .log/report.json --checksums --json > .log/said.json || fail "--report"
python3 - .log/plan.json .log/report.json .log/said.json << 'END' || fail "the accounts"
import json, sys
plan, report, said = (json.load(open(path)) for path in sys.argv[1:])
assert plan["tensors"] == report["tensors"] and report["tensors"] == said["tensors"]
assert sum(len(tensor["sources"]) for tensor in report["tensors"] + report["dropped"]) == report["in"]["tensors"]
assert len(report["tensors"]) == report["out"]["tensors"] and sum(report["written"]["bytes_by_rank"]) == report["out"]["bytes"]
END
"$program" verify counted > /dev/null || fail "verify of an export with checksums"
printf X | dd of=counted/model.safetensors bs=1 seek=200000 conv=notrunc 2> /dev/null
"$program" verify counted > /dev/null && fail "verify of a changed byte"
"$program" export shards --plan llama --to 7 --out seven --memory-budget 8MiB > /dev/null || fail "4 to 7"
"$program" shard model --to 7 --plan llama --out wanted > /dev/null || fail "7"
for rank in 0 3 6; do cmp -s seven/rank-0000$rank-of-00007.safetensors wanted/rank-0000$rank-of-00007.safetensors || fail "4 to 7, rank $rank"; done
"$program" diff seven model --plan auto > /dev/null || fail "diff of shards and model"
"$program" diff seven shards --plan auto > /dev/null || fail "diff of shards and shards"

# Invalid input: one line with the names, status 2, nothing written.
echo '{"muster_plan": 1, "rules": [{"match": "*", "action": "same"}, {"match": "*", "action": "first"}]}' > twice.json
refused "rule 2" "$program" export shards --plan twice.json --out new
echo '{"muster_plan": 1, "rules": [{"match": "*", "action": "same", "dim": 1}]}' > keys.json
refused "dim" "$program" export shards --plan keys.json --out new
printf '{"muster_plan": 1,\n "rules": [\n {"match": "*", "action": "smae"}]}' > action.json
refused "line 3" "$program" export shards --plan action.json --out new
echo '{"muster_plan": 1, "rules": [{"match": "*q_proj.weight", "action": "same"}]}' > few.json
refused "no rule matches the tensors" "$program" export shards --plan few.json --out new
refused "has 8 ranks, and the source has 4" "$program" export shards --plan llama --from tp=2,pp=2,ep=2 --out new
refused 'layout "tp=two"' "$program" export shards --plan llama --to tp=two --out new
refused "the pattern for the number of an expert" "$program" shard model --to ep=2 --plan llama --out new
refused "too few" "$program" export shards --plan llama --memory-budget 1KB --out new
refused "--out is required" "$program" export shards --plan llama
cp -r shards ambiguous
echo '{"model_type": "bert", "architectures": ["LlamaForCausalLM"]}' > ambiguous/config.json
refused "bert" "$program" export ambiguous --plan auto --out new
echo '{}' > ambiguous/config.json
refused "neither" "$program" export ambiguous --plan auto --out new
rm -r ambiguous

for fault in pwrite:ENOSPC fsync:EIO rename:EIO; do
  refused "new" env MUSTER_FAULT=$fault:1 "$program" shard model --to 4 --plan llama --out new
  refused "new" env MUSTER_FAULT=$fault:1 "$program" export shards --plan llama --out new
  refused "--force" env MUSTER_FAULT=$fault:1 "$program" export shards --plan llama --out alone
done
MUSTER_FAULT=pwrite:ENOSPC:3 "$program" export shards --plan llama --out alone --force 2> /dev/null && fail "a full disk was no failure"
"$program" diff model alone > /dev/null || fail "a failed --force export lost what was there"

# A disk that is really full, if one can be mounted.
if unshare -m true 2> /dev/null; then
  mkdir disk
  said=$(unshare -m bash -c 'mount -t tmpfs -o size=1m none disk || exit 9
    "$0" export shards --plan llama --out disk/new 2>&1 > /dev/null; echo "status $?, left: $(ls -A disk)"' "$program")
  case $said in
    *"No space left on device"*"status 2, left: ") ;;
    *) fail "a full disk: $said" ;;
  esac
  rmdir disk
else
  echo "not tried: no right to mount a small disk"
fi

mv shards/rank-00002-of-00004.safetensors .log/
refused "rank-00002-of-00004" "$program" export shards --plan llama --out new
refused "rank-00002-of-00004" "$program" run -n 4 -- "$program" export shards --plan llama --out new
head -c 100000 .log/rank-00002-of-00004.safetensors > shards/rank-00002-of-00004.safetensors
refused "rank-00002-of-00004" "$program" export shards --plan llama --out new
refused "rank-00002-of-00004" "$program" run -n 4 -- "$program" export shards --plan llama --out new
head -c 4 .log/rank-00002-of-00004.safetensors > shards/rank-00002-of-00004.safetensors
refused "rank-00002-of-00004" "$program" export shards --plan llama --out new
cp .log/rank-00002-of-00004.safetensors shards/
cp .log/rank-00002-of-00004.safetensors shards/rank-00002-of-00005.safetensors
refused "has sets of shards of 4 and of 5 ranks" "$program" export shards --plan llama --out new
rm shards/rank-00002-of-00005.safetensors
"$program" export shards --plan llama --out alone --force > /dev/null || fail "--force"
"$program" diff model alone > /dev/null || fail "what replaced the old one differs"

# A report may be written to devices, pipes and links, which keep their type. It never overwrites input files.
refused "is an input file" "$program" export shards --plan llama --out new --report shards/rank-00001-of-00004.safetensors
refused "is an input file" "$program" run -n 4 -- "$program" export shards --plan llama --out new --report shards/config.json
refused "is an input file" "$program" export shards --plan first.json --out new --report first.json
refused "is a directory" "$program" export shards --plan llama --out new --report model
refused "does not exist" "$program" export shards --plan llama --out new --report nowhere/report.json
refused "is an input file" "$program" export shards --plan llama --out new --fingerprint shards/config.json
refused "is the file of --report" "$program" export shards --plan llama --out new --report one --fingerprint one
# The fingerprint is that of the output, and the checksums beside it have the same CRCs.
"$program" export shards --plan llama --out printed --checksums --fingerprint .log/printed > /dev/null || fail "--fingerprint"
"$program" fingerprint printed | cmp - .log/printed || fail "another fingerprint"
grep -q '"crc64-xz"' printed/muster.checksums.json || fail "other checksums than CRCs"
"$program" verify printed > /dev/null || fail "CRCs that do not verify"
is_json() { python3 -c 'import json, sys; json.load(open(sys.argv[1]))["tensors"]' "$1" 2> /dev/null || fail "no report in $1"; }
ln -s target.json link.json
"$program" export shards --plan llama --out linked --report link.json > /dev/null || fail "a report through a link"
[ -L link.json ] || fail "a report replaced a link"
is_json target.json
mkfifo pipe
cat pipe > .log/piped & reader=$!
exec 9> pipe
"$program" export shards --plan llama --out piped --report pipe > /dev/null || fail "a report to a pipe"
exec 9>&-
wait $reader
[ -p pipe ] || fail "a report replaced a pipe"
is_json .log/piped
status=0
"$program" export shards --plan llama --out complete --report pipe > /dev/null 2> "$err" || status=$?
[ "$status" = 3 ] || fail "a report that nobody reads: status $status"
grep -q '"complete" is complete, but its report could not be written' "$err" || fail "a report that nobody reads: $(cat "$err")"
"$program" diff model complete > /dev/null || fail "complete differs"
if mknod null c 1 3 2> /dev/null; then
  "$program" export shards --plan llama --out nulled --report null > /dev/null || fail "a report to a device"
  [ -c null ] || fail "a report replaced a device"
fi
for name in link.json pipe; do
  ln -f -s target.json out.h5
  refused "is not a regular file" "$program" convert model/model.safetensors out.h5 --force
  rm out.h5
done
mkdir tree && cp -r shards tree/
refused "is part of the source and cannot be the output" "$program" export tree/shards --plan llama --out tree --force
touch alone/notes.txt
refused '("notes.txt")' "$program" export shards --plan llama --out alone --force
rm alone/notes.txt

# A limit on the file size is an error, and not a signal.
for command in "export shards --plan llama --out new -j 1" \
  "shard model --to 2 --plan llama --out new" "convert alone/model.safetensors new.h5"; do
  refused "Raise it (ulimit -f)" bash -c "ulimit -f 100; exec $program $command"
done

# The extra files that are copied, and those that are not.
touch model/pytorch_model.bin && ln -s /etc/passwd model/linked
"$program" shard model --to 2 --plan llama --out bare > .log/said || fail "shard beside other weights"
grep -qF 'skipped: "linked" (a link to "/etc/passwd", outside the directory), "pytorch_model.bin" (weights of another format). Select files with --extra-files.' .log/said ||
  fail "not said: $(cat .log/said)"
[ "$(ls bare | grep -v rank-)" = config.json ] || fail "carried: $(ls bare)"
"$program" shard model --to 2 --plan llama --out every --extra-files all > /dev/null || fail "--extra-files all"
[ -f every/pytorch_model.bin ] && [ -f every/linked ] && ! [ -L every/linked ] || fail "skipped: $(ls every)"
"$program" export every --plan llama --out chosen --extra-files 'config*,linked' --report .log/report.json > /dev/null || fail "--extra-files globs"
[ "$(ls chosen | grep -v model)" = "$(printf 'config.json\nlinked')" ] || fail "carried: $(ls chosen)"
"$program" export every --plan llama --out usual --report .log/report.json > /dev/null || fail "export beside other weights"
grep -q '"file": "pytorch_model.bin"' .log/report.json || fail "not in the report"

# An interrupted program removes its unfinished output, then terminates by the signal. The next run removes the output
# of a killed one.
"$demo" big --megabytes 64 > /dev/null || fail "no big model"
bigfile=$(ls big/*.safetensors | head -1)
"$program" shard big --to 4 --plan llama --out bigshards > /dev/null || fail "big shards"
begun() { compgen -G "$1.partial-*" > /dev/null; }
# interrupted SIGNAL STATUS OUT COMMAND...: sends SIGNAL when OUT has been started. A command that finishes earlier runs
# again.
interrupted() {
  local signal=$1 wanted=$2 made=$3 status child try
  shift 3
  for try in {1..20}; do
    rm -rf "$made"
    # Resets ignored signals. A shell ignores SIGINT in background jobs, its own parent may ignore others, and a program
    # would inherit both.
    env --default-signal=INT,TERM,HUP "$@" > "$out" 2> "$err" & child=$!
    until begun "$made" || ! kill -0 $child 2> /dev/null; do :; done
    kill -"$signal" $child 2> /dev/null
    wait $child 2> /dev/null
    status=$?
    [ "$status" = 0 ] || break
  done
  [ "$status" = "$wanted" ] || fail "status $status, not $wanted, by SIG$signal: $*: $(cat "$out" "$err")"
  [ -e "$made" ] && fail "made by an interrupted program: $*"
  [ "$signal" = KILL ] || ! begun "$made" || fail "left behind by SIG$signal: $*: $(ls)"
}
for signal in INT:130 TERM:143 HUP:129; do
  interrupted ${signal%:*} ${signal#*:} cut "$program" export bigshards --plan llama --out cut -j 1
done
interrupted TERM 143 cut "$program" export bigshards --plan llama --out cut -j 3
interrupted TERM 143 cut "$program" shard big --to 4 --plan llama --out cut
interrupted TERM 143 cut.h5 "$program" convert "$bigfile" cut.h5
interrupted KILL 137 cut "$program" export bigshards --plan llama --out cut -j 1
begun cut || fail "nothing to clean up"
mkdir holder && mv cut.partial-* holder/
refused "run it again with the same output" "$program" gc holder
mv holder/* .
"$program" export bigshards --plan llama --out cut > /dev/null || fail "export after a killed one"
begun cut && fail "left behind: $(ls)"
interrupted KILL 137 cut.h5 "$program" convert "$bigfile" cut.h5
"$program" convert "$bigfile" cut.h5 > /dev/null || fail "convert after a killed one"
begun cut.h5 && fail "left behind: $(ls)"

finish
