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
    from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM,
                              AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    from transformers import CONFIG_MAPPING
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has torch and transformers", file=sys.stderr)
    sys.exit(77)

muster = sys.argv[1]
masked = ("bert", "roberta")

base = dict(vocab_size=97, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
experts = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
               shared_expert_intermediate_size=24, n_shared_experts=1, n_group=1, topk_group=1, q_lora_rank=16,
               kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1)
hybrid = dict(**experts, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=8,
              layer_types=["linear_attention", "full_attention"] * 2)
vision = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14)
qwen_vision = dict(depth=2, hidden_size=24, intermediate_size=32, num_heads=4, out_hidden_size=48, patch_size=4,
                   deepstack_visual_indexes=[0])
multi = {**base, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}}
# Other names of the same sizes.
small = dict(num_layers=4, num_decoder_layers=4, d_model=48, d_ff=72, d_kv=4, num_heads=12, n_embd=48, n_layer=4,
             n_head=12, n_layers=4, n_heads=12, n_positions=64, n_inner=72, max_seq_len=64, rotary_dim=4, ffn_dim=72,
             word_embed_proj_dim=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=12,
             decoder_attention_heads=12, encoder_ffn_dim=72, decoder_ffn_dim=72, max_source_positions=32,
             max_target_positions=32)
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
    ("gpt2", {}, ["2", "tp=2,pp=2"]),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 6}, ["2"]),
    ("qwen3_next", hybrid, ["2"]),
]
# With MUSTER_TEST_ALL: all others that --plan auto knows by a plan of their own.
if os.environ.get("MUSTER_TEST_ALL"):
    models += [
        ("cohere2", {}, ["2", "4"]),
        ("olmo3", {}, ["2", "4"]),
        ("apertus", {}, ["2", "4"]),
        ("ernie4_5_moe", {**experts, "moe_num_experts": 4, "moe_k": 2}, ["2", "4", "tp=2,ep=2"]),
        ("qwen3_5_text", hybrid, ["2", "4"]),
        ("bloom", {}, ["2", "4", "tp=2,pp=2"]),
        ("mpt", {}, ["2", "4"]),
        ("gptj", {}, ["2", "4"]),
        ("gpt_bigcode", {}, ["2", "4"]),
        ("opt", {}, ["2", "4", "tp=2,pp=2"]),
        ("t5", {}, ["2", "4"]),
        ("whisper", {}, ["2", "4"]),
        ("modernbert", {}, ["2", "4"]),
        ("albert", {"embedding_size": 16}, ["2", "4"]),
        ("mamba", {}, ["2", "4", "tp=2,pp=2"]),
        ("jamba", experts, ["2", "4"]),
        ("gemma3", {"text_config": base, "vision_config": vision}, ["2", "4", "tp=2,pp=2"]),
        ("qwen2_5_vl", {"text_config": multi, "vision_config": qwen_vision}, ["2", "4"]),
        ("qwen3_vl", {"text_config": multi, "vision_config": qwen_vision}, ["2", "4"]),
    ]


def run(*arguments):
    done = subprocess.run([muster, *arguments], capture_output=True, text=True)
    check(done.returncode == 0, f"muster {' '.join(arguments)}: status {done.returncode}: {done.stdout}{done.stderr}")


def config_of(kind, more):
    """A tiny one: base, and what else this kind calls the same."""
    config_class = CONFIG_MAPPING[kind]
    if "text_config" in more:
        return config_class(**more)
    known = config_class()
    names = {name: value for name, value in {**small, **base}.items()
             if hasattr(known, name) or name in known.attribute_map}
    if isinstance(getattr(config_class, "head_dim", None), property):
        names.pop("head_dim", None)
    return config_class(**{**names, **more})


def logits_of(model, kind):
    """Of a few words; None where a model wants more than words, or other sizes than these."""
    words = torch.arange(3, 19).reshape(1, 16)
    if kind in ("whisper", "qwen2_5_vl", "qwen3_vl", "deepseek_v3"):
        return None
    more = {"decoder_input_ids": words} if kind == "t5" else {}
    with torch.no_grad():
        return model.eval()(input_ids=words, use_cache=False, **more).logits


def check_model(kind, more, layouts, work):
    config = config_of(kind, more)
    classes = next(auto for auto in (AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText, AutoModelForSeq2SeqLM,
                                     AutoModelForCausalLM, AutoModelForMaskedLM)
                   if type(config) in auto._model_mapping and not (auto is AutoModelForCausalLM and kind in masked))
    torch.manual_seed(len(kind))
    model = classes.from_config(config, dtype=torch.bfloat16)
    given = f"{work}/{kind}"
    model.save_pretrained(given)
    state = model.state_dict()
    logits = logits_of(classes.from_pretrained(given, dtype=torch.bfloat16), kind)
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
        if logits is not None:
            check(torch.equal(logits_of(loaded, kind), logits), f"{kind} {layout}: other logits")


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
