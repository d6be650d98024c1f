#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# All commands agree about a directory. Each kind of damage is refused by every command, is listed by verify, and leaves
# no file behind. Weights that are not part of the model are named by every command, and verify still reports the
# directory as good.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
data=$(cd "$(dirname "$0")/../data" && pwd) || exit 1
source "$(dirname "$0")/cli.sh"

"$demo" one --megabytes 3 > /dev/null || fail "no demo model"
"$program" export one --out parts --max-shard-size 1MB > /dev/null || fail "no model of several files"
"$program" shard one --to 3 --plan llama --out shards > /dev/null || fail "no shards"
mkdir -p .log/single && "$program" export one --out .log/single/model > /dev/null || fail "no model of one file"
single=.log/single/model/model.safetensors
index=model.safetensors.index.json
count=$(ls parts/*.safetensors | wc -l)
name() { printf 'model-%05d-of-%05d.safetensors' "$1" "$count"; }

# refused WORDS DAMAGE: damages a copy of the model in parts. Every command must refuse it with WORDS.
refused() {
  local words=$1 command
  rm -rf bad && cp -r parts bad && (cd bad && eval "$2") || fail "no damage: $2"
  "$program" verify bad > "$out" 2> "$err"
  [ $? = 1 ] || fail "verify takes it for good: $2: $(cat "$out" "$err")"
  grep -qF -- "$words" "$out" || fail "verify does not list \"$words\": $2: $(cat "$out")"
  for command in "export bad --out new" "shard bad --to 2 --plan llama --out new" "diff bad parts" "show bad" \
    "stats bad" "cat bad model.norm.weight" "ls bad" "plan suggest bad" "plan check llama bad"; do
    says 2 "$words" "$program" $command
    [ -e new ] && fail "$command left a directory"
  done
}
refused "\"$(name 1)\" does not exist. Copy that file as well" "rm $(name 1)"
refused "\"$(name 2)\" does not exist" "rm $index $(name 2)"
refused '"weight_map" is empty' "echo '{\"weight_map\": {}}' > $index"
refused "\"$(name 2)\" is a file of the same set and has no entry" "grep -v $(name 2) $index | sed -z 's/,\n  }/\n  }/' > x; mv x $index"
refused "two models" "cp ../$single ."
refused "different models and no index" "rm $index; cp $(name 1) a.safetensors; mv $(name 2) b.safetensors; rm model-*"
refused "the number is out of range (valid: 1 to $count)" "rm $index; mv $(name 1) $(name $((count + 1)))"
refused "Git LFS" "printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n' > $(name 1)"
refused "the shard of rank 1 of 3" "rm $index model-*; cp ../shards/rank-00001-of-00003.safetensors model.safetensors"
refused "two checkpoints" "cp ../shards/rank-00001-of-00003.safetensors ."

# A single file of a model can be shown, but it is not a model.
for file in "parts/$(name 1)" shards/rank-00001-of-00003.safetensors; do
  says 0 "tensors" "$program" show "$file"
  for command in "export $file --out new" "shard $file --to 2 --plan llama --out new"; do
    says 2 "not a model" "$program" $command
    [ -e new ] && fail "$command left a directory"
  done
done

mkdir torch && cp -r "$data"/foreign/torch_model/in/* torch/
mkdir fsdp && cp "$data"/foreign/fsdp/in/* fsdp/
mkdir dcp && cp "$data"/foreign/dcp/in/* dcp/
mkdir megatron && cp -r "$data"/megatron/dense/ranks/iter_0000100/* megatron/
for file in torch/pytorch_model-00001-of-00002.bin fsdp/model_world_size_3_rank_0.pt dcp/__0_0.distcp megatron/mp_rank_00_000/model_optim_rng.pt; do
  says 2 "not a model" "$program" export "$file" --out new
  [ -e new ] && fail "a part became a model: $file"
done
# The names of Megatron's folders do not show that the last rank is missing.
rm -r megatron/mp_rank_01_00?
says 2 "the file of tensor-parallel rank 1, stage 0, expert rank 0 does not exist" "$program" export megatron --plan megatron --out new
rm torch/*.index.json torch/pytorch_model-00001-of-00002.bin
says 2 '"pytorch_model-00001-of-00002.bin" does not exist' "$program" export torch --out new
says 1 '"pytorch_model-00001-of-00002.bin" does not exist' "$program" verify torch
echo '{"weight_map": {}}' > torch/pytorch_model.bin.index.json
says 2 '"weight_map" is empty' "$program" export torch --out new
says 2 "the file is not a model" "$program" export one/config.json --out new

# left_out NAME SETUP: SETUP adds the file NAME, which is not part of the model.
left_out() {
  rm -rf good new cut && cp -r parts good && (cd good && eval "$2") || fail "no setup: $2"
  says 0 "left out: $1" "$program" verify good
  says 0 "$1" "$program" export good --out new
  says 0 "$1" "$program" shard good --to 2 --plan llama --out cut
  says 0 "$1" "$program" show good
  [ "$(find new cut -name "$(basename "$1")" | wc -l)" = 0 ] || fail "$1 was carried along"
  cmp -s new/model.safetensors "$single" || says 0 "same" "$program" diff new parts
}
left_out consolidated.safetensors "cp $(name 1) consolidated.safetensors"
left_out adapter_model.safetensors "cp $(name 1) adapter_model.safetensors"
left_out model.fp16.safetensors "cp $(name 1) model.fp16.safetensors"
left_out model.safetensors.index.fp16.json "cp $index model.safetensors.index.fp16.json"
left_out consolidated.safetensors.index.json "cp $index consolidated.safetensors.index.json"

# Folders with weights are not copied, except those that modules.json lists.
mkdir -p good/checkpoint-500 good/1_Dense
for folder in checkpoint-500 1_Dense; do cp "parts/$(name 1)" good/$folder/model.safetensors && echo '{}' > good/$folder/config.json; done
echo '[{"path": ""}, {"path": "1_Dense"}]' > good/modules.json
says 0 "checkpoint-500/model.safetensors" "$program" export good --out new --force
[ -e new/checkpoint-500 ] && fail "weights in a folder were copied"
[ -e new/1_Dense/model.safetensors ] || fail "a module of sentence-transformers was not copied"

# File numbers start at 0, and the index counts tied weights twice.
rm -rf zero && mkdir zero && cp one/config.json zero/ && for i in $(seq "$count"); do cp "parts/$(name "$i")" "zero/$(name $((i - 1)))"; done
for i in $(seq "$count"); do echo "s/$(name "$i")/$(name $((i - 1)))/"; done | sed -f - parts/$index > zero/$index
says 0 "good" "$program" verify zero
says 0 "same" "$program" diff zero parts

# A part of a diffusers pipeline and an adapter keep the file names that their programs expect.
mkdir unet adapter && cp "$single" unet/diffusion_pytorch_model.safetensors && cp "$single" adapter/adapter_model.safetensors
echo '{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}' > unet/config.json
echo '{"peft_type": "LORA"}' > adapter/adapter_config.json
says 0 "tensors" "$program" export unet --out unet2
says 0 "tensors" "$program" export unet --out unet3 --max-shard-size 1MB
says 0 "tensors" "$program" export adapter --out adapter2
[ -e unet2/diffusion_pytorch_model.safetensors ] || fail "unet: $(ls unet2)"
[ -e unet3/diffusion_pytorch_model.safetensors.index.json ] || fail "unet in parts: $(ls unet3)"
[ -e adapter2/adapter_model.safetensors ] || fail "adapter: $(ls adapter2)"
says 0 "good" "$program" verify unet3
says 0 "tensors" "$program" export unet --out unet3 --force

# Directories above a checkpoint, and the Hugging Face cache.
mkdir -p hub/models--a--b/snapshots && cp -r one hub/models--a--b/snapshots/0123
for command in verify show "export --out new2" "shard --to 2 --plan llama --out new2"; do
  says 2 '"models--a--b/snapshots/0123" has a checkpoint' "$program" $command hub
done

# A low limit of open files is reported as an error of the command, not as a defect of the model.
mkdir many && "${MUSTER_TEST_PYTHON:-python3}" - << 'END' || fail "no model of many files"
import json
import struct

weights = {}
for i in range(1, 301):
    text = json.dumps({f't{i}': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}).encode()
    weights[f't{i}'] = f'model-{i:05d}-of-00300.safetensors'
    with open('many/' + weights[f't{i}'], 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + b'\0' * 4)
with open('many/model.safetensors.index.json', 'w') as file:
    json.dump({'metadata': {'total_size': 1200}, 'weight_map': weights}, file)
END
says 0 "good" "$program" verify many
says 2 "ulimit -n" bash -c "ulimit -n 100; '$program' verify many"
finish
