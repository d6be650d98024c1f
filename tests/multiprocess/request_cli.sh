#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shard, export and the commands that inspect checkpoints take the same request. A result is compared with its base, and
# casts do not change scales. Without a config.json, sizes come from the checkpoint. A refused command changes nothing.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
data=$(cd "$(dirname "$0")/../data" && pwd) || exit 1
source "$(dirname "$0")/cli.sh"

source "$data/../multiprocess/requests.sh"

"$demo" model --megabytes 2 --max-shard-size 1GB > /dev/null || fail "no demo model"

# Without a plan, a whole model is not copied for each rank: the request is refused.
for source in model model/model.safetensors "$data/foreign/torch_zip/in"; do
  refused "sharding it for 4 ranks needs a plan. Pass --to-plan auto" "$program" export "$source" --to 4 --out new
  refused "sharding it for 4 ranks needs a plan. Pass --to-plan auto" "$program" export "$source" --to 4 --dry-run
done
says 0 "split anew into" "$program" export model --to 4 --to-plan auto --out cut
says 0 "split into 4 shards" "$program" shard model --to 4 --plan auto --out shards
for rank in 0 1 2 3; do cmp -s cut/rank-0000$rank-of-00004.safetensors shards/rank-0000$rank-of-00004.safetensors || fail "cut: rank $rank"; done

# The result has the tensors of the base.
made headless "del t['model.norm.weight']"
made larger "t['model.extra.weight'] = t['model.norm.weight']"
made narrow "d, s, b = t['model.norm.weight']; t['model.norm.weight'] = d, [s[0] // 2], b[:len(b) // 2]"
made mixed "t['model.norm.weight'] = wide(t['model.norm.weight'])"
made float "t = {name: wide(tensor) for name, tensor in t.items()}"
made renamed "t = {name.replace('q_proj', 'query'): tensor for name, tensor in t.items()}"
refused 'the result lacks the tensor "model.norm.weight"' "$program" export headless --base-model model --out new
refused 'the result lacks the tensor "model.norm.weight"' "$program" export headless --base-model model --dry-run
refused 'the result lacks the tensor "model.norm.weight"' "$program" export headless --base-model model --to 2 --to-plan llama --out new
refused 'the result lacks the tensor "model.norm.weight"' "$program" shard headless --base-model model --to 2 --plan llama --out new
"$program" run -n 2 -- "$program" export headless --base-model model --out new > "$out" 2> "$err"
[ $? = 2 ] && [ ! -e new ] && grep -qF 'the result lacks the tensor "model.norm.weight"' "$err" || fail "two ranks: $(cat "$out" "$err")"
refused 'the base model lacks the tensor "model.extra.weight"' "$program" export larger --base-model model --out new
refused 'tensor "model.norm.weight": it is BF16' "$program" export narrow --base-model model --out new
refused '"model.norm.weight" is F32, and BF16 in the base model. Pass --dtype to cast them' "$program" export mixed --base-model model --out new
refused 'the result lacks the tensors "model.layers.0.self_attn.q_proj.weight"' "$program" export renamed --base-model model --out new
says 0 "tensors have a different dtype in the base model" "$program" export float --base-model model --out float32
says 0 "merged into" "$program" export mixed --base-model model --dtype BF16 --out bf16
same model bf16
says 0 "merged into" "$program" export headless --base-model model --exclude model.norm.weight --out most
says 0 "merged into" "$program" export larger --base-model model --exclude '*extra*' --out without
same model without
# The index is enough, even if the weight files are Git LFS pointers.
mkdir indexed && cp model/config.json indexed/
run_python "json.dump({'metadata': {}, 'weight_map': {n: 'model-00001-of-00001.safetensors' for n in read('model/model.safetensors')}},
                      open('indexed/model.safetensors.index.json', 'w'))"
refused 'the result lacks the tensor "model.norm.weight"' "$program" export headless --base-model indexed --out new
echo "version https://git-lfs.github.com/spec/v1" > indexed/model-00001-of-00001.safetensors
refused 'the result lacks the tensor "model.norm.weight"' "$program" export headless --base-model indexed --out new
# Without the weights of a base, the check finds a layer that lacks tensors of all other layers.
mkdir weightless && cp model/config.json weightless/
made torn "del t['model.layers.1.input_layernorm.weight']"
for plan in "" "--plan llama"; do
  refused 'lacks the tensor "model.layers.1.input_layernorm.weight"' "$program" export torn $plan --base-model weightless --out new
done
refused 'lacks the tensor "model.layers.1.input_layernorm.weight"' "$program" export torn --plan llama --out new
refused 'lacks the tensor "model.layers.1.input_layernorm.weight"' "$program" shard torn --base-model weightless --to 2 --plan llama --out new
says 0 "merged into" "$program" export torn --exclude '*layers.1.*' --out part
# A layer that is excluded from quantization has no scales. A layer with packed weights needs them.
for kind in plain_layer packed_layer; do
  made "$kind" "
for layer in range(sum(n.endswith('down_proj.weight') for n in t)):
  module = f'model.layers.{layer}.mlp.down_proj'
  if layer == 1 and '$kind' == 'plain_layer': continue
  _, s, b = t[module + '.weight']
  t[module + '.weight'] = 'F8_E4M3', s, bytes(len(b) // 2)
  if layer != 1: t[module + '.weight_scale'] = 'F32', [1], bytes(4)"
done
says 0 "merged into" "$program" export plain_layer --plan llama --out excluded
refused 'lacks the tensor "model.layers.1.mlp.down_proj.weight_scale"' "$program" export packed_layer --plan llama --out new

# Name prefixes of wrappers are removed, with a note. Nested prefixes are removed from the outside in, and also inside
# names.
number=0
wrapped() {
  number=$((number + 1))
  made wrapped$number "$1"
  for base in "--base-model model" "--base-model weightless" ""; do
    says 0 "is removed from the names of tensors" "$program" export wrapped$number $base --out unwrapped --force
    same model unwrapped
  done
  says 0 "split into 2 shards" "$program" shard wrapped$number --to 2 --plan llama --out unwrapped_shards --force
  same model unwrapped_shards
}
for prefix in module. model. _orig_mod. _fsdp_wrapped_module. _forward_module. base_model.model. module._orig_mod. _forward_module.model. module.model.; do
  wrapped "t = {'$prefix' + name: tensor for name, tensor in t.items()}"
done
wrapped "t = {name.replace('self_attn.', '_fsdp_wrapped_module.self_attn.'): tensor for name, tensor in t.items()}"
made adapter "t = {'base_model.model.model.layers.0.self_attn.q_proj.lora_' + x + '.weight': t['model.norm.weight'] for x in 'AB'}"
"$program" export adapter --out adapted > "$out" || fail "export of an adapter"
"$program" show adapted | grep -q "^base_model.model.model" || fail "names of an adapter have changed: $("$program" show adapted)"

# Casts do not change scales, packed weights, and tensors that the base keeps in F32. Exclusion is applied first.
made packed "q = 'model.layers.0.self_attn.q_proj.'
del t[q + 'weight']
t |= {q + 'qweight': ('I32', [2, 4], bytes(range(32))), q + 'qzeros': ('I32', [1, 4], bytes(16)),
      q + 'scales': ('F16', [1, 4], b'\1\2\3\4\5\6\7\10')}
k = 'model.layers.0.self_attn.k_proj.'
t |= {k + 'weight': ('I8', t[k + 'weight'][1], t[k + 'weight'][2][::2]), k + 'weight_scale': ('F32', [1], b'\1\2\3?')}
e = 'model.layers.0.mlp.experts.gate_up_proj'
t |= {e + '_blocks': ('U8', [1, 8], bytes(8)), e + '_scales': ('U8', [1, 1], b'\1'), e + '_bias': ('BF16', [4], bytes(8)),
      'logit_scale': ('F32', [], b'\0\0\0?')}"
run_python "c = json.load(open('packed/config.json')); c['quantization_config'] = {'quant_method': 'gptq'}; json.dump(c, open('packed/config.json', 'w'))"
says 0 "parts of quantised weights keep their dtype" "$program" export packed --dtype BF16 --out cast
run_python "a, b = read('packed/model.safetensors'), read('cast/model.safetensors')
kept = [n for n in a if a[n] == b[n] and a[n][0] != 'BF16']
assert sorted(n.rsplit('.', 1)[-1] for n in kept) == ['gate_up_proj_blocks', 'gate_up_proj_scales', 'logit_scale', 'qweight', 'qzeros', 'scales',
                                                      'weight', 'weight_scale'], kept
assert 'quantization_config' in json.load(open('cast/config.json'))"
for dtype in F8_E4M3FNUZ F8_E5M2FNUZ F6_E2M3 F6_E3M2; do
  made "$dtype" "q = 'model.layers.0.self_attn.q_proj.weight'; _, s, b = t[q]; t[q] = '$dtype', s, b[:len(b) // 2 if '$dtype'[1] == '8' else len(b) // 8 * 3]"
  refused "$dtype is quantised and cannot be cast" "$program" export $dtype --dtype F16 --out new
  says 0 "merged into" "$program" export $dtype --out kept_$dtype
  same $dtype kept_$dtype
  says 0 "good" "$program" verify $dtype
  says 0 "in a file of" "$program" convert $dtype/model.safetensors $dtype.h5
  same $dtype/model.safetensors $dtype.h5
  says 0 "in a file of" "$program" convert $dtype.h5 $dtype.safetensors
  same $dtype.safetensors $dtype
  says 0 "$dtype" "$program" show $dtype.h5
done
made eight "q = 'model.layers.0.self_attn.q_proj.weight'; t[q] = 'F8_E4M3', t[q][1], t[q][2][::2]"
refused '"model.layers.0.self_attn.q_proj.weight"' "$program" export eight --dtype F16 --out new
says 0 "merged into" "$program" export eight --dtype F16 --exclude '*layers.0*' --out eight_less
made router "t['model.layers.0.mlp.A_log'] = t['model.layers.1.mlp.A_log'] = ('F32', [1], b'\1\2\3?')"
made trained "t['model.layers.0.mlp.A_log'] = t['model.layers.1.mlp.A_log'] = ('F32', [1], b'\1\2\3?')
t['model.norm.weight'] = wide(t['model.norm.weight'])"
for base in "" "--base-model router"; do
  says 0 "Pass --cast-all to cast them as well" "$program" export router $base --dtype F16 --out kept --force
  run_python "t = read('kept/model.safetensors'); assert t['model.layers.0.mlp.A_log'] == ('F32', [1], b'\1\2\3?'), t
assert {d for n, (d, s, b) in t.items() if 'A_log' not in n} == {'F16'}"
  says 0 "merged into" "$program" export router $base --dtype F16 --cast-all --out kept --force
  run_python "assert {d for d, s, b in read('kept/model.safetensors').values()} == {'F16'}"
done
says 0 "these tensors are F32 among BF16 in the base" "$program" export trained --base-model router --dtype BF16 --out kept --force
same router kept
says 0 "merged into" "$program" export float --dtype BF16 --out all_cast
same model all_cast
made logit "t['logit_scale'] = ('F32', [], b'\0\0\0?')"
run_python "c = json.load(open('logit/config.json')); c['quantization_config'] = {}; json.dump(c, open('logit/config.json', 'w'))"
says 0 '"quantization_config" is removed from config.json: no tensor is quantised' "$program" export logit --dtype BF16 --out plain

# --force deletes no file of the user, keeps modes, and does not refuse to replace its own results.
mkdir -p custom && cp model/* custom/ && echo "pass" > custom/modeling.py && echo "card" > custom/README.md
says 0 "merged into" "$program" export model --base-model custom --out mine
for options in "--base-model custom" "" "--extra-files none" "--base-model custom --dtype F16" "--extra-files none" "--base-model custom"; do
  says 0 "merged into" "$program" export model $options --out mine --force
done
for name in notes.txt README.md config.json modeling.py; do
  cp mine/$name .log/before 2> /dev/null
  echo "by hand" > mine/$name
  for options in "" "--extra-files none" "--base-model custom"; do
    refused "(\"$name\")" "$program" export model $options --out mine --force
    refused "(\"$name\")" "$program" shard model --to 2 --plan llama $options --out mine --force
  done
  if [ $name = notes.txt ]; then rm mine/$name; else cp .log/before mine/$name; fi
done
chmod 2770 mine && chmod 640 mine/* mine/.muster.files.json
says 0 "merged into" "$program" export model --base-model custom --max-shard-size 1MB --out mine --force
[ "$(stat -c %a mine)" = 2770 ] || fail "mode of a replaced directory: $(stat -c %a mine)"
[ "$(stat -c %a mine/* | sort -u)" = 640 ] || fail "modes of files in a replaced directory: $(stat -c '%a %n' mine/*)"
says 0 "in a file of" "$program" convert model/model.safetensors one.h5
chmod 600 one.h5
says 0 "in a file of" "$program" convert model/model.safetensors one.h5 --force
[ "$(stat -c %a one.h5)" = 600 ] || fail "mode of a replaced file: $(stat -c %a one.h5)"
echo > report.json && chmod 640 report.json
says 0 "merged into" "$program" export model --out reported --report report.json
[ "$(stat -c %a report.json)" = 640 ] || fail "mode of a replaced report: $(stat -c %a report.json)"

# Ranks of other programs are inspected with a base, or with the sizes that are saved beside them.
megatron=$data/megatron/dense
cp -r "$megatron/ranks" bare
refused "\"num_attention_heads\" of config.json is needed, but config.json does not exist" "$program" export bare --plan megatron --out new
says 0 "model.norm.weight" "$program" show bare --plan megatron --base-model "$megatron/model"
says 0 "model.norm.weight" "$program" stats bare --select model.norm.weight --plan megatron --base-model "$megatron/model"
says 0 "model.norm.weight" "$program" cat bare model.norm.weight --plan megatron --base-model "$megatron/model"
same bare "$megatron/model" --plan megatron --base-model "$megatron/model"
run_python "
import struct, zipfile
for path, folders, names in os.walk('bare'):
    for name in [name for name in names if name.endswith('.pt')]:
        with zipfile.ZipFile(os.path.join(path, name)) as old:
            entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
        with zipfile.ZipFile(os.path.join(path, name), 'w', zipfile.ZIP_STORED) as new:
            for entry, content in entries:
                if entry.endswith('data.pkl'):
                    sizes = {'num_attention_heads': 4, 'num_query_groups': 2, 'hidden_size': 16, 'num_layers': 2, 'kv_channels': 4,
                             'ffn_hidden_size': 24, 'padded_vocab_size': 32}
                    saved = b''.join(b'X' + struct.pack('<I', len(k)) + k.encode() + b'K' + bytes([v]) for k, v in sizes.items())
                    saved += b'X' + struct.pack('<I', 21) + b'group_query_attention' + b'\x88'
                    begin = content.index(b'X\x0c\x00\x00\x00params_dtype')
                    content = content[:begin] + saved + content[begin:]
                new.writestr(entry, content)
"
same bare "$megatron/model" --plan megatron
says 0 "the sizes of the model are read from" "$program" export bare --plan megatron --out own_sizes
cp "$megatron/model/config.json" own_sizes/
same "$megatron/model" own_sizes
"$program" plan suggest bare > "$out" 2> "$err" || fail "plan suggest of ranks: $(cat "$err")"
grep -q '"extends": "megatron"' "$out" && grep -q "are read from" "$err" || fail "plan suggest of ranks: $(cat "$out" "$err")"

# Every command refuses an invalid request with the same status and object, and changes nothing. all_refuse WORDS PATH
# OPTIONS...
all_refuse() {
  local words=$1 path=$2
  shift 2
  refused "$words" "$program" export "$path" "$@" --out new
  refused "$words" "$program" export "$path" "$@" --dry-run
  refused "$words" "$program" export "$path" "$@" --to 2 --to-plan llama --out new
  refused "$words" "$program" shard "$path" "$@" --to-plan llama --to 2 --out new
  refused "$words" "$program" show "$path" "$@"
  refused "$words" "$program" ls "$path" "$@"
  refused "$words" "$program" stats "$path" "$@"
  refused "$words" "$program" cat "$path" model.norm.weight "$@"
  refused "$words" "$program" diff "$path" model "$@"
  refused "$words" "$program" diff model "$path" "$@"
  refused "$words" "$program" verify "$path" "$@"
  # For this command the plan is an argument.
  local check=()
  while [ $# -gt 0 ]; do
    if [ "$1" = --plan ]; then local plan=$2; shift 2; else check+=("$1"); shift; fi
  done
  refused "$words" "$program" plan check "$plan" "$path" "${check[@]}"
}
cp -r bare torn_ranks && rm -r torn_ranks/iter_0000100/mp_rank_01_001
hf=$megatron/model
mkdir no_config
all_refuse 'nowhere' nowhere --plan megatron --base-model "$hf"
all_refuse '"nowhere": reading the base model: config.json does not exist' bare --plan megatron --base-model nowhere
all_refuse '"no_config": reading the base model: config.json does not exist' bare --plan megatron --base-model no_config
all_refuse 'no plan "no_plan"' bare --plan no_plan --base-model "$hf"
all_refuse '"torn.json"' bare --plan torn.json --base-model "$hf"
echo '{"muster_plan": 1' > torn.json
all_refuse '"torn.json"' bare --plan torn.json --base-model "$hf"
all_refuse 'layout 3 has 3 ranks' bare --plan megatron --base-model "$hf" --from 3
all_refuse 'layout "apples"' bare --plan megatron --base-model "$hf" --from apples
all_refuse "--file-pattern \"ranks.pt\": {rank} is missing" bare --plan megatron --base-model "$hf" --file-pattern ranks.pt
all_refuse "no file matches the pattern \"none.{rank}.pt\"" bare --plan megatron --base-model "$hf" --file-pattern 'none.{rank}.pt'
all_refuse '"no_key"' bare --plan megatron --base-model "$hf" --key no_key
all_refuse 'the file of tensor-parallel rank 1, stage 1, expert rank 0 does not exist' torn_ranks --plan megatron --base-model "$hf"

# Export and verify agree on the same request, whether or not the checkpoint fits it.
says 0 "good" "$program" verify bare --plan megatron --base-model "$hf"
says 0 "model.norm.weight" "$program" plan check megatron bare --base-model "$hf"
says 0 "model.norm.weight" "$program" ls bare --plan megatron --base-model "$hf"
says 0 "good" "$program" verify shards --base-model model
refused 'the result lacks the tensor "model.norm.weight"' "$program" verify headless --base-model model
refused 'the base model lacks the tensor "model.extra.weight"' "$program" verify larger --base-model model
says 1 'no rule matches' "$program" plan check llama bare --base-model "$hf"
# Shards of one job among several are cut for another layout, selected as in an export.
"$program" shard model --to 2 --plan llama --workspace --out jobs > "$out" || fail "a workspace"
"$program" shard model --to 4 --plan llama --workspace --out jobs > "$out" || fail "a second job: $(cat "$out")"
job=$(sed -n 's/^job \([0-9a-f]*\),.*/\1/p' "$out")
for command in "export jobs --out anew2" "shard jobs --plan llama --to-plan llama --to 2 --out anew2"; do
  refused "jobs" "$program" $command
done
says 0 "split into 2 shards" "$program" shard jobs --job-id "$job" --plan llama --to-plan llama --to 2 --out anew2
"$program" shard model --to 2 --plan llama --out two > /dev/null
cmp -s anew2/rank-00001-of-00002.safetensors two/rank-00001-of-00002.safetensors || same anew2 two

# Meta's files of Llama 2: the embedding is cut by columns, and a file that does not match the config is refused.
mkdir meta weights && cp model/config.json weights/
run_python "
c = json.load(open('model/config.json'))
t, heads = read('model/model.safetensors'), c['num_attention_heads']
def part(tensor, dim, rank):
    dtype, shape, data = tensor
    rows, columns = shape
    if dim == 0:
        return dtype, [rows // 2, columns], data[rank * len(data) // 2:(rank + 1) * len(data) // 2]
    row, half = len(data) // rows, len(data) // rows // 2
    return dtype, [rows, columns // 2], b''.join(data[i * row + rank * half:i * row + (rank + 1) * half] for i in range(rows))
for rank in range(2):
    write(f'meta/consolidated.0{rank}.safetensors', {'tok_embeddings.weight': part(t['model.embed_tokens.weight'], 1, rank),
          'output.weight': part(t['lm_head.weight'], 0, rank), 'norm.weight': t['model.norm.weight']})
write('weights/model.safetensors', {n: t[n] for n in ('model.embed_tokens.weight', 'lm_head.weight', 'model.norm.weight')})
c['num_hidden_layers'] = 0
json.dump(c, open('weights/config.json', 'w'))
c['vocab_size'] = c['hidden_size'] // 2
"
says 0 "merged into" "$program" export meta --file-pattern 'consolidated.0{rank}.safetensors' --plan meta --base-model weights --out llama2
says 0 "same" "$program" diff weights/model.safetensors llama2/model.safetensors

# Sizes, and the files that loaders look for.
refused '"0" is not a size of at least 1 byte' "$program" export model --max-shard-size 0 --out new
refused '"1.5 apples" is not a size' "$program" export model --memory-budget "1.5 apples" --out new
says 0 "merged into" "$program" export model --max-shard-size 1500.5KB --memory-budget 8MiB --out sized
says 0 "in a file of" "$program" convert one.h5 loaded.safetensors
same loaded.safetensors one.h5
says 0 "in a file of" "$program" convert "$data/foreign/torch_zip/in" from_torch.safetensors
for file in loaded from_torch; do
  head -c 3000 $file.safetensors | grep -q '"format": *"pt"' || fail "$file has no format: $(head -c 200 $file.safetensors)"
done

finish
