#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One row per kind of refusal: the exit status, the object and the cause in the message, and an unchanged directory.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
data=$(cd "$(dirname "$0")/../data" && pwd) || exit 1
source "$(dirname "$0")/../multiprocess/cli.sh"
source "$data/../multiprocess/requests.sh"

# row OBJECT WORDS COMMAND...: the command is refused, and its message contains both.
row() {
  local object=$1
  shift
  refused "$1" "$program" "${@:2}"
  grep -qF -- "$object" "$err" || fail "no \"$object\": ${*:2}: $(cat "$err")"
}

"$demo" model --megabytes 2 --max-shard-size 1GB > /dev/null || fail "no demo model"

# ---- plans ----
mkdir plans
plan() {
  echo "$3" > "plans/$1.json"
  row "plans/$1.json" "$2" plan show "plans/$1.json"
  row "plans/$1.json" "$2" export model --plan "plans/$1.json" --out new
}
rule() { plan "$1" "$2" "{\"muster_plan\": 1, \"rules\": [$3]}"; }
view() { plan "$1" "$2" "{\"muster_plan\": 1, \"extends\": \"llama\", \"views\": [$3]}"; }
plan list "not a plan: it is" '[]'
plan versionless 'not a plan: "muster_plan": 1 is missing' '{"rules": [{"match": "*", "action": "same"}]}'
plan ruleless '"rules" is not a list with at least one rule' '{"muster_plan": 1, "rules": []}'
rule no_dim '"concat" needs "dim"' '{"match": "*", "action": "concat"}'
rule head_sizes '"head_sizes" needs "heads", a list of as many numbers' \
  '{"match": "*", "action": "concat", "dim": 0, "heads": ["a", "b"], "head_sizes": ["a", "b", "c"]}'
rule scale '"heads" needs "dim", their dimension' '{"match": "*", "action": "scale", "heads": "a"}'
rule regex 'malformed regular expression "("' '{"regex": "(", "action": "same"}'
rule rename '"rename" counts the stars of the pattern' '{"match": "{a.*,b}.w", "action": "same", "rename": "c"}'
rule long 'characters, and the limit is' "{\"match\": \"$(printf 'a%.0s' {1..5000})\", \"action\": \"same\"}"
view split '"split" is not an object with' '{"match": "a", "split": 2, "to": ["b", "c"]}'
view two_splits '"split" has more than one of' '{"match": "a", "split": {"blocks": [1, 1], "heads": ["x", "y"]}, "to": ["b", "c"]}'
view no_cast '"overflow" needs "cast"' '{"match": "a", "overflow": true}'
view to '"to" is neither a name nor a list of names' '{"match": "a", "to": 3}'
view names '"to" has 1 names for 2 parts' '{"match": "a", "split": {"blocks": [1, 1]}, "to": ["b"]}'
view unstack '"unstack" needs one "#"' '{"match": "a", "unstack": true, "to": "b"}'
many=$(printf '{"match": "a%d", "drop": "x"},' $(seq 20000))
view many_views 'views: the limit is' "${many%,}"
many=$(printf '{"match": "a%d", "action": "same"},' $(seq 20000))
rule many_rules 'rules: the limit is' "${many%,}"

# ---- arguments that contradict each other ----
row "--out" "--out is required, unless --dry-run is given" export model
row "--out" "--out is required, unless --dry-run is given" shard model --to 2 --plan llama
row "checksums" "--checksums: shards have no checksum file; only a checkpoint has one" export model --to 2 --to-plan llama --checksums --out new
row "fingerprint" "fingerprint: shards have parts of tensors" export model --to 2 --to-plan llama --fingerprint crcs --out new
row "--dry-run" "--fingerprint" export model --dry-run --fingerprint crcs
row "--to-plan" "needs a layout. Pass --to LAYOUT" export model --to-plan llama --out new
cp model/model.safetensors one.safetensors
for command in "export model" "shard model --to 2 --plan llama"; do
  row '"model"' "is part of the source" $command --out model
  row '"one.safetensors"' "already exists" $command --out one.safetensors
  row '"one.safetensors"' "it is not a directory" $command --out one.safetensors --force
  row '"no/new"' 'the directory "no" does not exist' $command --out no/new
done

# ---- checksums ----
row '"one.safetensors"' "not the directory of a checkpoint" verify --write-checksums one.safetensors
mkdir half && cp model/config.json half/
run_python "json.dump({'metadata': {}, 'weight_map': {'a': 'model-00001-of-00002.safetensors'}}, open('half/model.safetensors.index.json', 'w'))"
cp model/model.safetensors half/model-00002-of-00002.safetensors
row '"half"' "the checkpoint is not complete" verify --write-checksums half
cp -r model sums && "$program" verify --write-checksums sums > /dev/null
sums() {
  run_python "c = json.load(open('sums/muster.checksums.json'))
$2
json.dump(c, open('sums/muster.checksums.json', 'w'))"
  says 1 "$1" "$program" verify sums
  grep -qF 'muster.checksums.json' "$out" || fail "no file of checksums: $(cat "$out")"
}
cp sums/muster.checksums.json .log/sums
sums 'the object "tensors" is missing' "c['tensors'] = []"
sums '"algorithm" is missing' "del c['algorithm']"
sums 'not a JSON object' "c = []"

# ---- headers ----
header() {
  mkdir -p headers
  run_python "import struct
text = sys.argv[2].encode()
open('headers/' + sys.argv[1] + '.safetensors', 'wb').write(struct.pack('<Q', len(text)) + text + bytes(4))" "$1" "$3"
  local file=headers/$1.safetensors
  row "\"$file\"" "$2" show "$file"
  row "\"$file\"" "$2" export "$file" --out new
  row "\"$file\"" "$2" convert "$file" new.h5
  row "\"$file\"" "$2" diff "$file" model
}
header no_dtype 'tensor "t": dtype is missing' '{"t": {"shape": [1], "data_offsets": [0, 4]}}'
header no_shape 'tensor "t": shape is missing' '{"t": {"dtype": "F32", "data_offsets": [0, 4]}}'
header null_extent 'tensor "t": shape has null, expected an integer' '{"t": {"dtype": "F32", "shape": [null], "data_offsets": [0, 4]}}'
header own_dtype 'tensor "t": unknown dtype "U4"' '{"t": {"dtype": "U4", "shape": [8], "data_offsets": [0, 4]}}'
header six_bits 'tensor "t": 5 elements of F6_E2M3 end in the middle of a byte' '{"t": {"dtype": "F6_E2M3", "shape": [5], "data_offsets": [0, 4]}}'
header six_bits_long 'F6_E3M2 [4] needs 3 bytes' '{"t": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 4]}}'

# ---- ranks ----
ranks() {
  mkdir "$1"
  run_python "one = ('F32', [2], bytes(8))
all = json.loads(sys.argv[2])
for rank, names in enumerate(all):
    write(f'{sys.argv[1]}/rank-0000{rank}-of-0000{len(all)}.safetensors', {name: one for name in names})" "$1" "$3"
  row "$4" "$2" export "$1" --plan llama --from "$5" --out new
}
ranks numbers "pipeline stage 1 has the layers 5, 7" '[["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"],
  ["model.layers.5.input_layernorm.weight", "model.layers.7.input_layernorm.weight"]]' "they must be 0 to 1 (numbers of the rank) or 2 to 3 (numbers of the model)" pp=2
ranks twice "without the prefixes of wrappers" '[["model._orig_mod.norm.weight", "model.norm.weight"]]' '"model.norm.weight"' 1
"$program" shard model --to 3 --plan llama --out padded > /dev/null || fail "three ranks"
run_python "import struct
path = 'padded/rank-00001-of-00003.safetensors'
data = open(path, 'rb').read()
length, = struct.unpack('<Q', data[:8])
header = json.loads(data[8:8 + length])
facts = json.loads(header['__metadata__']['muster.shard'])
assert facts['padded'], facts
for place in facts['padded'].values(): place[1] -= 1
header['__metadata__']['muster.shard'] = json.dumps(facts)
text = json.dumps(header).encode()
open(path, 'wb').write(struct.pack('<Q', len(text)) + text + data[8 + length:])"
row "rank 0 and rank 1" "record different paddings" export padded --out new
stable=model.layers.0.self_attn
made heads "for i in range(4): t[f'$stable.q_layernorm.norms.{i}.weight'] = ('BF16', [4], bytes(8))"
row "\"$stable.q_layernorm.norms.0.weight\"" "Each is the norm of one head" shard heads --to 2 --plan llama --out new
row "\"$stable.q_layernorm.norms.0.weight\"" "Each is the norm of one head" export heads --to 2 --to-plan llama --out new
says 1 "Each is the norm of one head" "$program" plan check llama heads
says 0 "merged into" "$program" export heads --out heads_again
same heads heads_again

# ---- checkpoints of other programs ----
# foreign NAME OBJECT WORDS: the path, by every command that reads it.
foreign() {
  row "$2" "$3" export "$1" --out new
  row "$2" "$3" shard "$1" --to 2 --plan llama --out new
  row "$2" "$3" show "$1"
  row "$2" "$3" diff "$1" model
  row "$2" "$3" stats "$1"
}
mkdir torch
run_python "
import pickle, zipfile
def archive(name, parts):
    with zipfile.ZipFile('torch/' + name, 'w', zipfile.ZIP_STORED) as out:
        for part, content in parts.items():
            out.writestr(part, content)
empty = pickle.dumps({}, 2)
own = {}
own['a'] = own
archive('two.pt', {'a/data.pkl': empty, 'b/data.pkl': empty})
archive('beside.pt', {'a/data.pkl': empty, 'b/file': b'x'})
archive('own.pt', {'a/data.pkl': pickle.dumps(own, 2)})
open('torch/version.pt', 'wb').write(pickle.dumps(0x1950a86a20f9469cfc6c, 2) + pickle.dumps(1002, 2) + empty * 3)
open('torch/more.pt', 'wb').write(open(sys.argv[1] + '/torch_legacy/in', 'rb').read() + b'xyz')
" "$data/foreign"
foreign torch/two.pt '"torch/two.pt"' "the entry data.pkl is duplicated"
foreign torch/beside.pt '"torch/beside.pt"' 'entry "b/file" is not below "a/"'
foreign torch/own.pt '"torch/own.pt"' "the dicts are nested too deeply, or contain themselves"
foreign torch/version.pt '"torch/version.pt"' "the file has an unknown version of the older format of torch.save"
foreign torch/more.pt '"torch/more.pt"' "3 bytes follow the last storage"
mkdir bin && cp model/config.json bin/ && echo "some text" > bin/pytorch_model.bin
foreign bin '"bin/pytorch_model.bin"' "not a file of torch.save"
mkdir tracked && echo "some" > tracked/latest_checkpointed_iteration.txt
foreign tracked '"tracked/latest_checkpointed_iteration.txt"' '"some" is not an iteration'
echo 12 > tracked/latest_checkpointed_iteration.txt
foreign tracked '"tracked/latest_checkpointed_iteration.txt"' "the recorded directory \"tracked/iter_0000012\" does not exist"
# changed SAMPLE NAME GLOB OLD NEW: copies a sample and replaces bytes in these files; in torch.save files, in their
# pickles.
changed() {
  cp -r "$data/foreign/$1/in" "$2"
  run_python "
import glob, zipfile
for path in sorted(glob.glob(sys.argv[1], recursive=True, include_hidden=True)):
    if os.path.isdir(path): continue
    data = open(path, 'rb').read()
    if data[:2] != b'PK' or path.endswith('.distcp'):
        open(path, 'wb').write(data.replace($4, $5))
        continue
    with zipfile.ZipFile(path) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as new:
        for entry, content in entries:
            new.writestr(entry, content.replace($4, $5) if entry.endswith('data.pkl') else content)
" "$2/$3"
}
changed zero1 flat '**' "b'torch\nFloatStorage'" "b'torch\nIntStorage'"
foreign flat '"flat' "the flat weights are not contiguous 32-bit numbers"
changed zero1 worlds '*/mp_rank_00_model_states.pt' "b'dp_world_sizeq\x9bK\x02'" "b'dp_world_sizeq\x9bK\x04'"
foreign worlds 'mp_rank_00_model_states.pt"' "belongs to a job of 4 ranks, and the files of the optimizer belong to one of 2"
changed dcp_safetensors offsets '*.distcp' "b'DCP_SHARDING_INFO'" "b'DCP_SHARDING_none'"
foreign offsets '"offsets/' "DCP_SHARDING_INFO is missing"
changed dcp other '.metadata' "b'\x8c\x08Metadata'" "b'\x8c\x08Metafile'"
foreign other '"other/.metadata"' "not a Metadata object of torch.distributed.checkpoint"
# Both files are from the first rank. Its parts would exist twice, and those of the other rank would be missing.
cp -r "$data/foreign/fsdp1/in" doubled && cp doubled/model_world_size_2_rank_0.pt doubled/model_world_size_2_rank_1.pt
foreign doubled '"doubled"' "overlap"
changed dcp_safetensors dtypes '__1_0.distcp' "b'\"dtype\":\"BF16\"'" "b'\"dtype\":\"F16\" '"
foreign dtypes '"dtypes' "its parts have different dtypes"

# ---- files beside the weights ----
cp -r model deep && mkdir -p deep/"$(printf 'a/%.0s' {1..40})" && echo x > deep/"$(printf 'a/%.0s' {1..40})"/file
row '"deep/a/a' "folders are more than 32 levels deep" export deep --out new
finish
