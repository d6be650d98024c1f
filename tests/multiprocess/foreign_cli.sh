#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A complete third-party checkpoint: several processes each write their share, and the bytes equal those of one process.
# It is cut into shards like a model. Files of single ranks are refused with an error that names the right command.
# Nothing is written from an unreadable checkpoint.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
data=$(cd "$(dirname "$0")/../data/foreign" && pwd) || exit 1
source "$(dirname "$0")/cli.sh"

"${MUSTER_TEST_PYTHON:-python3}" - << 'END' || fail "no checkpoint"
import array
import json
import os
import struct


def write(path, tensors, metadata):
    header, data = {'__metadata__': metadata}, b''
    for name, (shape, values) in tensors.items():
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [len(data), len(data) + 4 * len(values)]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + data)


os.mkdir('in')
os.mkdir('ranks')
for rank in range(2):
    tensors = {'wide': ([512, 3000], array.array('f', range(rank * 512 * 3000, (rank + 1) * 512 * 3000))),
               'tall': ([4000, 256], array.array('f', range(rank * 4000 * 256, (rank + 1) * 4000 * 256)))}
    offsets = {'wide': [rank * 512, 0], 'tall': [0, rank * 256]}
    info = {name: {'saved_offsets': offset} for name, offset in offsets.items()}
    write(f'in/shard-0000{rank}-model-00001-of-00001.safetensors', tensors, {'DCP_SHARDING_INFO': json.dumps(info)})
    write(f'ranks/rank{rank}.safetensors', tensors, {})
with open('ranks/config.json', 'w') as file:
    json.dump({'mapping': {'tp_size': 2, 'pp_size': 1}}, file)
with open('plan.json', 'w') as file:
    json.dump({'muster_plan': 1, 'rules': [{'match': '*', 'action': 'concat', 'dim': 0}]}, file)
END

for options in "" "--dtype BF16" "--writers rank0" "--memory-budget 8MB"; do
  says 0 "2 tensors" "$program" export in --out alone --force $options
  says 0 "written by rank" "$program" run -n 3 -- "$program" export in --out job --force $options
  cmp -s alone/model.safetensors job/model.safetensors || fail "3 ranks with '$options' wrote other bytes"
done
says 0 "written by rank: " "$program" export in -j 3 --out job --force
cmp -s alone/model.safetensors job/model.safetensors || fail "-j 3 wrote other bytes"
says 0 '"bytes": 20480000' "$program" export in --dry-run --json
says 0 '"free": null' "$program" export in --dry-run --json
says 0 '"memory": 25165824' "$program" export in --dry-run --json
says 0 '"memory": 7999488' "$program" export in --dry-run --json --memory-budget 8MB --out new
says 0 '"memory": 75497472' "$program" export in -j 3 --dry-run --json
for new in new new/ new/. "$PWD/new/"; do
  "$program" export in --dry-run --json --out "$new" | grep -q '"free": [0-9]' || fail "--dry-run does not say what is free for $new"
done
says 0 "would write 20.5 MB and use 25.2 MB of memory for buffers; " "$program" shard in --to 2 --plan plan.json --out new/ --dry-run
says 0 " free in \"$PWD\"" "$program" shard in --to 2 --plan plan.json --out new/ --dry-run
"$program" run -n 3 -- "$program" export in --out job --force --json > report.json || fail "export with --json"
"${MUSTER_TEST_PYTHON:-python3}" -c '
import json
written = json.load(open("report.json"))["written"]
assert written["windows"] == 0 and len(written["bytes_by_rank"]) == 3 and min(written["bytes_by_rank"]) > 1e6, written
' || fail "not every rank wrote its share: $(cat report.json)"

says 0 "split into 2 shards" "$program" shard in --to 2 --plan plan.json --out shards
says 0 "merged into 2" "$program" export shards --out back
cmp -s alone/model.safetensors back/model.safetensors || fail "shards of a foreign checkpoint came back with other bytes"
says 2 "muster export ranks --plan plan.json --to 2 --out DIR" "$program" shard ranks --to 2 --plan plan.json --out other
says 0 "good: 2 tensors of 2 files" "$program" verify in
mkdir odd && cp ranks/rank0.safetensors odd/a0.safetensors && cp ranks/rank1.safetensors odd/a1.safetensors
says 0 "good: 4 tensors of 2 files" "$program" verify odd --file-pattern 'a{rank}.safetensors'

# A Megatron-Core save (tests/interop/megatron_core.py): its files of ranks and its torch_dist files both yield the
# model.
for plan in megatron megatron-moe; do
  [ $plan = megatron ] && kind=dense || kind=mixture
  for form in ranks dist; do
    says 0 "merged into" "$program" export "$data/../megatron/$kind/$form" --plan "$plan" --base-model "$data/../megatron/$kind/model" --out "$kind-$form"
    says 0 "same" "$program" diff "$data/../megatron/$kind/model" "$kind-$form"
  done
done

# Two processes, each with its own copy of the checkpoint. The copies have the same files with different modification
# times.
for rank in 0 1; do mkdir "r$rank" && cp -r in "r$rank/in" && touch -d "@$((1700000000 + rank))" "r$rank"/in/*; done
"$program" run -n 2 -- bash -c 'cd "r$RANK" && exec "$0" export in --out ../unlike' "$program" > "$out" 2> "$err"
[ $? = 2 ] || fail "processes with other files: $(cat "$out" "$err")"
grep -qF "rank 1 and rank 0 read different files of the checkpoint" "$err" || fail "which rank is not said: $(cat "$err")"
[ -z "$(find . -name '*unlike*')" ] || fail "processes with other files have written: $(find . -name '*unlike*')"

# flip_entry FILE ENTRY: flips a bit of an entry of a zip archive.
flip_entry() {
  flip "$1" "$("${MUSTER_TEST_PYTHON:-python3}" - "$1" "$2" << 'END'
import struct
import sys
import zipfile
begin = zipfile.ZipFile(sys.argv[1]).getinfo(sys.argv[2]).header_offset
with open(sys.argv[1], 'rb') as file:
    file.seek(begin + 26)
    print(begin + 30 + sum(struct.unpack('<HH', file.read(4))))
END
)"
}
cp "$data/torch_zip/in" flipped.pt && flip_entry flipped.pt in/data/5
says 1 'checksum: tensor "float64": checksum mismatch: ' "$program" verify flipped.pt
says 0 "good: 23 tensors of 1 file" "$program" verify flipped.pt --headers-only
# Tensors outside the key are not read.
cp -r "$data/dcp/in" some && flip_entry some/__1_0.distcp archive/data/0
says 1 'checksum: tensor "model.layers.1.mlp.weight": checksum mismatch: ' "$program" verify some
says 1 'checksum: tensor "1.mlp.weight": checksum mismatch: ' "$program" verify some --key model.layers
says 0 "good: 2 tensors of 3 files" "$program" verify some --key model.layers.0
says 2 'no tensor has the key "ema" (available: "model")' "$program" verify some --key ema

# refused WORDS SOURCE DAMAGE OPTIONS...: runs with a damaged copy of SOURCE, in one process and in two.
refused() {
  local words=$1 source=$2 damage=$3
  shift 3
  rm -rf bad outputs && cp -r "$source" bad && mkdir outputs || fail "no copy of $source"
  (cd bad 2> /dev/null; eval "$damage") || fail "not done: $damage"
  for processes in 1 2; do
    says 2 "$words" "$program" export bad -j $processes --out outputs/model "$@"
    [ -z "$(ls -A outputs)" ] || fail "written in spite of '$words': $(ls -A outputs)"
  done
}
echo '{"muster_plan": 1, "rules": [{"match": "wide", "action": "concat", "dim": 0}]}' > misfit.json
sed 's/"dim": 0/"dim": 2/' plan.json > flat.json
refused "truncated zip archive" "$data/torch_zip/in" 'truncate -s -1 bad'
refused 'tensor "float64": checksum mismatch' "$data/torch_zip/in" 'flip_entry bad in/data/5' --checksums
refused '"ema" does not exist' "$data/torch_zip/in" : --key ema
refused "truncated" "$data/torch_legacy/in" 'truncate -s -1 bad'
refused "pytorch_model-00002-of-00002.bin" "$data/torch_model/in" 'rm pytorch_model-00002-of-00002.bin'
refused "__1_0.distcp" "$data/dcp/in" 'rm __1_0.distcp'
refused "__1_0.distcp" "$data/dcp/in" 'truncate -s 100 __1_0.distcp'
refused 'bad/__1_0.distcp" have the checksum' "$data/dcp/in" 'flip_entry __1_0.distcp archive/data/0' --checksums
refused 'no tensor has the key "ema"' "$data/dcp/in" : --key ema
refused ".metadata does not exist" "$data/dcp/in" 'rm .metadata'
refused 'tensor "model.embed.weight": 28 of 56 elements' "$data/dcp_no_collectives/in" 'rm __1.metadata'
refused 'tensor "embed.weight": 28 of 56 elements' "$data/dcp_huggingface/in" 'rm shard-00001*'
refused "the directory has two checkpoints: a checkpoint of torch.distributed.checkpoint and a model in files of torch.save" "$data/dcp/in" 'cp "$data"/torch_model/in/*.bin* .'
refused "to read that one, or move one away" "$data/zero2/in" 'cp ../alone/model.safetensors .'
refused 'unsupported sharded_backend "zarr" (expected torch_dist)' "$data/torch_dist/in" 'sed -i s/torch_dist/zarr/ metadata.json'
refused "model_world_size_3_rank_1.pt does not exist" "$data/fsdp/in" 'rm *_rank_1.pt'
refused "the file was renamed or swapped: its part belongs to rank 1, and its name has rank 2" "$data/fsdp/in" 'cp *_rank_1.pt *_rank_2.pt'
refused "[0:3, 0:3] and [0:3, 0:3] overlap" "$data/fsdp1/in" 'cp *_rank_0.pt *_rank_1.pt'
refused 'model_world_size_4_rank_1.pt": reading: tensor "embed.weight": the file was renamed or swapped: its part belongs to rank 0' "$data/fsdp_tp/in" 'cp *_rank_0.pt *_rank_1.pt'
refused "the file belongs to a job of 2 ranks, and 1 ranks are present" "$data/zero1/in" 'rm */*rank_1_*'
refused 'latest": reading: the recorded directory "bad/global_step2" does not exist' "$data/zero2/in" 'echo global_step2 > latest'
refused "zero_pp_rank_1_mp_rank_00_model_states.pt" "$data/zero3/in" 'rm */*rank_1_*model_states.pt'
refused "config.json has 2 ranks, and 1 ranks are present" ranks 'rm rank1.safetensors' --plan plan.json
refused "rank1.safetensors" ranks 'truncate -s -1 rank1.safetensors' --plan plan.json
refused "do not record their plan. Pass --plan" ranks :
refused "pass --file-pattern 'rank{rank}.safetensors'" ranks 'rm config.json'
refused 'tensor "tall"' ranks : --plan misfit.json
refused "layout 3 has 3 ranks, and the source has 2 shards" ranks : --plan plan.json --from 3
refused 'tensor "wide" (rule 1): concat: dimension 2 is out of range for shape [512, 3000]' ranks : --plan flat.json
refused 'the pattern for the number of a layer' ranks : --plan plan.json --to tp=1,pp=2
refused "no file matches the pattern" ranks : --plan plan.json --file-pattern 'part{rank}.pt'
refused "part 0 of rank 0 does not exist" ranks 'rm config.json rank1.*; mv rank0.safetensors model-rank-0-part-1.safetensors'
refused "the file of rank 1 of 3 does not exist" ranks 'rm *; cp "$data/torch_zip/in" consolidated.00.pth; cp "$data/torch_zip/in" consolidated.02.pth'
refused "does not exist" ranks 'rm *; for i in 00_000 01_001; do mkdir mp_rank_$i; cp "$data/torch_zip/in" mp_rank_$i/model_optim_rng.pt; done'
refused 'tensor "tall"' in : --plan misfit.json
refused 'tensor "tall" (rule 1): concat: dimension 2 is out of range for shape [4000, 512]' in : --plan flat.json --to 2
refused 'the pattern for the number of a layer' in : --plan plan.json --to tp=1,pp=2

finish
