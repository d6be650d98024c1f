#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Names of options before version 0.2 are refused with the new name. The rows come from the table in tools/usage.cpp.
# Options that select, filter and sort; the JSON of commands that others do not test.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
root=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
source "$(dirname "$0")/cli.sh"

# Every old name, in every command that had it.
sources=$(sed -n 's/^constexpr std::string_view sources = "\(.*\)";$/\1/p' "$root/tools/usage.cpp")
rows=0
while IFS='|' read -r commands old remedy; do
  for command in ${commands:-$sources}; do
    [ "$command" = plan ] && command="plan check"
    # shellcheck disable=SC2086
    says 2 "muster $command: error: $old is not supported: $remedy" "$program" $command $old
    [[ $old == --* ]] && says 2 "is not supported: $remedy" "$program" $command model "${old/ /=}"
    rows=$((rows + 1))
  done
done < <(sed -n '/constexpr std::array old = {/,/^};/p' "$root/tools/usage.cpp" | tr '\n' ' ' | sed 's/OldName{/\n/g' |
  sed -n 's/^sources, *"\([^"]*\)", *"\([^"]*\)".*/|\1|\2/p; s/^"\([^"]*\)", *"\([^"]*\)", *"\([^"]*\)".*/\1|\2|\3/p')
[ "$rows" -gt 60 ] || fail "only $rows old names found"

# Selection by repeated globs, dtype and size; sorting.
"$demo" model --megabytes 2 > /dev/null || fail "no demo model"
"$program" shard model --to 2 --plan llama --out shards > /dev/null || fail "shard"
"$program" ls model --select '*layers.0.{input,post}*' --select 'lm_head.*' --exclude 'model*post*' > .log/names
[ "$(cat .log/names)" = $'lm_head.weight\nmodel.layers.0.input_layernorm.weight' ] ||
  [ "$(sort .log/names)" = $'lm_head.weight\nmodel.layers.0.input_layernorm.weight' ] || fail "ls: $(cat .log/names)"
says 0 "1 tensor," "$program" show model --select model.norm.weight
says 2 'no tensor name matches "{model.norm.weigth,lm}"; did you mean' "$program" show model --select model.norm.weigth --select lm
says 2 "comma" "$program" show model --select 'a,b' --select c
says 0 "0 tensors" "$program" stats model --only-dtype I64
says 2 '--only-dtype: "F99" is not a dtype' "$program" ls model --only-dtype F99
[ "$("$program" ls model --larger-than 10kB | wc -l)" -lt "$("$program" ls model | wc -l)" ] || fail "--larger-than"
[ "$("$program" ls model --sort size | tail -1)" = "$("$program" show model --json --sort size | grep '"name"' | tail -1 | cut -d '"' -f 4)" ] ||
  fail "ls and show sort otherwise"
[ "$("$program" stats model --sort name --json | grep '"name"')" = "$("$program" stats model --json | grep '"name"' | LC_ALL=C sort)" ] ||
  fail "stats --sort name"
says 0 '"name":"lm_head.weight"' "$program" cat model --select 'lm_head.*' --json
says 2 "missing NAME" "$program" cat model

# The same selection in commands that copy or compare.
model=$(find model -name '*.safetensors' | sort | head -1)
says 0 '"tensors": 1' "$program" convert "$model" one.h5 --select model.embed_tokens.weight --json
says 0 "model.embed_tokens.weight" "$program" ls one.h5
says 1 "different" "$program" diff one.h5 "$model"
says 0 "same: 1 tensor" "$program" diff one.h5 "$model" --select model.embed_tokens.weight
says 0 "merged into 2 " "$program" export shards --select model.norm.weight --select 'lm_head.*' --out few
says 0 '"tensors": 2' "$program" shard model --to 2 --plan llama --select model.norm.weight --select lm_head.weight --out part --json
cp -r shards damaged
offset=$(($(stat -c %s damaged/rank-00000-of-00002.safetensors) - 1))
flip damaged/rank-00000-of-00002.safetensors $offset
says 1 "checksum" "$program" verify damaged
says 0 "good" "$program" verify damaged --select model.layers.0.input_layernorm.weight
says 0 '"checksums_written": 2' "$program" verify --write-checksums few --json
"$program" convert "$model" state.h5 > /dev/null || fail "convert"
says 0 "good: 1 tensor of 1 file, " "$program" verify state.h5 --select model.embed_tokens.weight
says 0 "; 1 checksum checked; $(($("$program" ls state.h5 | wc -l) - 1)) tensors not selected" \
  "$program" verify state.h5 --select model.embed_tokens.weight
says 0 '"not_selected": 0' "$program" verify state.h5 --json
says 2 'no tensor matches --select "embed" and --exclude ""' "$program" verify state.h5 --select embed
zero=$root/tests/data/foreign/zero1/in
says 0 "; 1 checksum checked; 11 tensors not selected" "$program" verify "$zero" --select tied.bias
says 0 "note: buffers and weights" "$program" verify "$zero"
grep -q "left out" "$out" && fail "a note is not an omission: $(cat "$out")"
says 0 "12 tensors (466 B) merged into 12 " "$program" export "$zero" --dry-run

# Orders of lists, and the selection of muster plan check.
names() { "$program" "$@" --json | grep '"name": "' | cut -d '"' -f 4; }
plan() { names plan check llama model "$@"; }
[ "$(plan --select lm_head.weight --select '*.0.input*')" = "$(plan | grep -e lm_head -e '.0.input')" ] || fail "plan check --select"
[ "$(plan --sort name)" = "$(names show model --sort name)" ] || fail "plan check --sort name"
[ "$(plan --sort size)" = "$(names show model --sort size)" ] || fail "plan check --sort size"
[ "$(plan --larger-than 100kB)" = "$(names show model --larger-than 100kB)" ] || fail "plan check --larger-than"
says 2 'no tensor matches --select "none"' "$program" plan check llama model --select none
says 2 'no tensor matches --select "none"' "$program" plan check llama shards --select none
echo '{"muster_plan": 1, "rules": [{"match": "*norm*", "action": "same"}]}' > other.json
says 1 "problem" "$program" plan check other.json model
says 0 "model.norm.weight" "$program" plan check other.json model --select 'model.norm*'
"$program" export shards --dry-run --sort size --json > .log/size || fail "export --dry-run --sort"
[ "$(grep -m 2 '"origin": "' .log/size | cut -d '"' -f 4 | sort)" = "$(names show model --sort size | head -2 | sort)" ] ||
  fail "export --sort size"
says 2 "only valid with" "$program" export shards --sort size --out new
"$program" shard model --to 2 --plan llama --workspace --out workspace > /dev/null || fail "shard --workspace"
touch -d "2 days ago" workspace/state-*-r1-*
states() { "$program" ls workspace --sort "$1" --json | sed -n 's/.*"rank": \([0-9]*\).*/\1/p' | tr '\n' ' '; }
[ "$(states rank)" = "0 1 " ] && [ "$(states age)" = "1 0 " ] && [ "$(states name)" = "0 1 " ] ||
  fail "ls --sort of states: $(states rank), $(states age), $(states name)"
says 2 "--sort age is only valid for a workspace" "$program" ls model --sort age
head -c 20 "$model" > damaged/rank-00000-of-00002.safetensors
"$program" verify damaged --sort defect > .log/defect
cut -d : -f 1 .log/defect | head -n -1 | LC_ALL=C sort -c || fail "verify --sort defect: $(cat .log/defect)"

# The report of a job. The status of a rank is that of the job, and a rank that a signal ended has its number.
says 2 "is only valid with --logs" "$program" run -n 2 --json -- true
"$program" run -n 2 --logs logs --json -- sh -c 'echo out; [ $RANK = 0 ] || kill -KILL $$; sleep 9' > .log/run 2> "$err"
[ $? = 137 ] || fail "status of a killed job: $(cat "$err")"
python3 - << 'END' || fail "the report of a job: $(cat .log/run)"
import json
report = json.load(open(".log/run"))
assert report["status"] == 137 and "rank 1" in report["message"] and report["seconds"] > 0
assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
assert report["ranks"][1]["signal"] == 9 and report["ranks"][1]["status"] == 137
assert 0 < report["ranks"][1]["seconds"] <= report["ranks"][0]["seconds"] <= report["seconds"]
END

# JSON of the commands about plans.
says 0 '"muster_plan"' "$program" plan show llama --json
says 0 '"uncertain": [' "$program" plan suggest model --json
says 0 '"forecast"' "$program" shard model --to 2 --plan auto --dry-run --json
finish
