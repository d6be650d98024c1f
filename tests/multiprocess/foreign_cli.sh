#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A foreign checkpoint that is whole: several processes write the same bytes as one, each its share; it is cut into
# shards like a model; files of ranks are not, and the words say what does it.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
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

for options in "" "--dtype BF16" "--writers first" "--memory-budget 8MB"; do
  says 0 "2 tensors" "$program" export in --out alone --force $options
  says 0 "written by rank" "$program" run -n 3 -- "$program" export in --out job --force $options
  cmp -s alone/model.safetensors job/model.safetensors || fail "3 ranks with '$options' wrote other bytes"
done
"$program" run -n 3 -- "$program" export in --out job --force --json > report.json || fail "export with --json"
"${MUSTER_TEST_PYTHON:-python3}" -c '
import json
written = json.load(open("report.json"))["written"]
assert written["windows"] == 0 and len(written["bytes_by_rank"]) == 3 and min(written["bytes_by_rank"]) > 1e6, written
' || fail "not every rank wrote its share: $(cat report.json)"

says 0 "cut into 2 shards" "$program" shard in --ranks 2 --plan plan.json --out shards
says 0 "merged into 2" "$program" export shards --out back
cmp -s alone/model.safetensors back/model.safetensors || fail "shards of a foreign checkpoint came back with other bytes"
says 2 "muster export ranks --plan plan.json --to 2 --out DIR" "$program" shard ranks --ranks 2 --plan plan.json --out other
says 0 "good: 2 tensors of 2 files" "$program" verify in
mkdir odd && mv ranks/rank0.safetensors odd/a0.safetensors && mv ranks/rank1.safetensors odd/a1.safetensors
says 0 "good: 4 tensors of 2 files" "$program" verify odd --shards 'a{rank}.safetensors'

finish
