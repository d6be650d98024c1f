# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, tiny and random: cut into shards, exported again, and loaded as their users load them.

For each architecture: what AutoModel finds in the export is what it was given, with nothing missing and nothing left over;
muster verify finds it whole and muster diff finds it the same.
Argument: the program muster. Exit status: 0, 1, or 77 where torch or transformers cannot be imported (skipped)."""
import os
import subprocess
import sys
import tempfile

import checks
from checks import check

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers import CONFIG_MAPPING
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has torch and transformers", file=sys.stderr)
    sys.exit(77)

muster = sys.argv[1]

base = dict(vocab_size=97, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
experts = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
               shared_expert_intermediate_size=24, n_shared_experts=1, n_group=1, topk_group=1, q_lora_rank=16,
               kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1)
# Model type, more of its config, layouts.
models = [
    ("llama", {}, ["2", "3", "tp=2,pp=2"]),
    ("qwen2", {"tie_word_embeddings": True}, ["4"]),
    ("qwen3", {}, ["7"]),
    ("gemma2", {}, ["3"]),
    ("phi3", {}, ["2", "3", "7"]),
    ("gpt_neox", {}, ["3", "tp=2,pp=2"]),
    ("bert", {}, ["2", "3", "7"]),
    ("roberta", {}, ["2"]),
    ("mixtral", experts, ["2", "tp=2,pp=2,ep=2"]),
    ("qwen3_moe", experts, ["tp=1,pp=2,ep=2"]),
    ("deepseek_v3", experts, ["3", "tp=2,ep=2"]),
    ("gpt_oss", experts, ["2", "tp=2,ep=2"]),
]


def run(*arguments):
    done = subprocess.run([muster, *arguments], capture_output=True, text=True)
    check(done.returncode == 0, f"muster {' '.join(arguments)}: status {done.returncode}: {done.stdout}{done.stderr}")


def check_model(kind, more, layouts, work):
    classes = AutoModelForMaskedLM if kind in ("bert", "roberta") else AutoModelForCausalLM
    torch.manual_seed(len(kind))
    model = classes.from_config(CONFIG_MAPPING[kind](**{**base, **more}), dtype=torch.bfloat16)
    given = f"{work}/{kind}"
    model.save_pretrained(given)
    state = model.state_dict()
    for layout in layouts:
        shards, out = f"{work}/{kind}-{layout}-shards", f"{work}/{kind}-{layout}"
        run("shard", given, "--ranks", layout, "--plan", "auto", "--out", shards)
        run("verify", shards)
        run("diff", given, shards, "--plan", "auto")
        run("export", shards, "--plan", "auto", "--out", out, "--max-shard-size", "40kB")
        run("verify", out)
        run("diff", given, out)
        loaded, info = classes.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            check(not info.get(what), f"{kind} {layout}: {what}: {info.get(what)}")
        again = loaded.state_dict()
        check(again.keys() == state.keys(), f"{kind} {layout}: other names")
        for name, tensor in state.items():
            check(torch.equal(again[name], tensor), f"{kind} {layout}: {name} differs")


known = 0
for kind, more, layouts in models:
    if kind not in CONFIG_MAPPING:
        print(f"not tried: this transformers ({transformers.__version__}) has no {kind}")
        continue
    with tempfile.TemporaryDirectory(prefix="muster-models-") as work:
        check_model(kind, more, layouts, work)
    known += 1
    print(f"{kind}: {', '.join(layouts)}", flush=True)
check(known >= 5, "too few of the models are known here")
print(f"{known} models, {checks.count} checks")
