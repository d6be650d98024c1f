# SPDX-License-Identifier: Apache-2.0
"""Writes facts about the models of transformers, with which tests compare Muster's built-in plans.

Run this script by hand when models.json or transformers changes. It needs torch and transformers:

    python tests/interop/transformers_facts.py SOURCE_DIR

It writes two files:

- src/checkpoint/plan/builtin/defaults.json has, for each model type, the numbers of heads that a config.json may omit.
- tests/data/architectures.json has, for each model type:
  - a tiny config;
  - the names and shapes of its tensors as save_pretrained writes them (one of those that differ only by numbers);
  - the names of the tensors of its other classes;
  - the axes along which transformers cuts its matrices (tp_plan);
  - those along which Megatron-LM and vLLM cut the other matrices (parallel_layers).
"""
import json
import os
import re
import struct
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

sizes = dict(vocab_size=96, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=12,
             num_key_value_heads=6, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=24, shared_expert_intermediate_size=24, n_shared_experts=1, num_shared_experts=1,
             n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4,
             v_head_dim=4, first_k_dense_replace=1, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
             intermediate_size_mlp=40, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8,
             linear_value_head_dim=6,
             # Other names of these sizes.
             num_layers=2, num_decoder_layers=2, d_model=48, d_ff=72, d_kv=4, num_heads=12, n_embd=48, n_layer=2,
             n_head=12, n_layers=2, n_heads=12, n_positions=64, n_inner=72, max_seq_len=64, rotary_dim=4, ffn_dim=72,
             word_embed_proj_dim=48, embedding_size=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=12,
             decoder_attention_heads=12, encoder_ffn_dim=72, decoder_ffn_dim=72, max_source_positions=32,
             max_target_positions=32, dim=48, hidden_dim=72, num_kv_heads=6)
vision = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28,
              patch_size=14, depth=2, num_heads=4, out_hidden_size=48, deepstack_visual_indexes=[0],
              vision_output_dim=24, projector_input_dim=24, projector_output_dim=24)
# Settings that determine which tensors a model has.
switches = {"falcon": {"new_decoder_architecture": True}, "cohere": {"use_qk_norm": True},
            "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}}
# In attention and in the feed-forward network, the first matrices are cut by rows (outputs), and the last one by
# columns (inputs).
attention = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
gated = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
shared_expert = (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), ("mlp.shared_expert.down_proj",))
shared_experts = (("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), ("mlp.shared_experts.down_proj",))
bert = (("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        ("attention.output.dense", "output.dense"))
mamba = (("in_proj", "conv1d", "dt_proj"), ("x_proj", "out_proj"))
parallel = {
    "albert": [(("attention.query", "attention.key", "attention.value", "ffn"), ("attention.dense", "ffn_output"))],
    "bert": [bert], "camembert": [bert], "electra": [bert], "roberta": [bert], "xlm-roberta": [bert],
    "bitnet": [attention, gated], "stablelm": [attention, gated],
    "bloom": [(("self_attention.query_key_value", "mlp.dense_h_to_4h"), ("self_attention.dense", "mlp.dense_4h_to_h"))],
    "falcon": [(("self_attention.query_key_value", "mlp.dense_h_to_4h"),
                ("self_attention.dense", "mlp.dense_4h_to_h"))],
    "gpt_neox_japanese": [(("attention.query_key_value", "mlp.dense_h_to_4h"),
                           ("attention.dense", "mlp.dense_4h_to_h"))],
    "deepseek_v3": [(("self_attn.q_b_proj", "self_attn.kv_b_proj"), ("self_attn.o_proj",))],
    "exaone_moe": [shared_experts], "glm4_moe_lite": [shared_experts], "solar_open": [shared_experts],
    "qwen2_moe": [shared_expert], "qwen3_vl": [attention, gated],
    "distilbert": [(("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
                    ("attention.out_lin", "ffn.lin2"))],
    "gpt2": [(("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj"))],
    "gpt_bigcode": [(("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj"))],
    "gpt_oss": [attention], "granitemoe": [attention], "phimoe": [attention],
    "jamba": [attention, (("feed_forward.gate_proj", "feed_forward.up_proj"), ("feed_forward.down_proj",)),
              tuple([f"mamba.{name}" for name in names] for names in mamba)],
    "mamba": [tuple([f"mixer.{name}" for name in names] for names in mamba)],
    "modernbert": [(("attn.Wqkv", "mlp.Wi"), ("attn.Wo", "mlp.Wo"))],
    "mpt": [(("attn.Wqkv", "ffn.up_proj"), ("attn.out_proj", "ffn.down_proj"))],
    "opt": [(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"), ("self_attn.out_proj", "fc2"))],
    "t5": [(("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "EncDecAttention.q", "EncDecAttention.k",
             "EncDecAttention.v", "DenseReluDense.wi"), ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"))],
    "whisper": [(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "encoder_attn.q_proj",
                  "encoder_attn.k_proj", "encoder_attn.v_proj", "fc1"),
                 ("self_attn.out_proj", "encoder_attn.out_proj", "fc2"))],
}
default_key = re.compile(r"(num_|n_|encoder_|decoder_|linear_num_)\w*heads?|head_dim|linear_\w+_head_dim|multi_query|"
                         "new_decoder_architecture")


def fields_of(config_class):
    fields = {}
    for base in reversed(config_class.__mro__):
        fields.update(getattr(base, "__dataclass_fields__", {}))
    return fields


def text_class_of(config_class):
    """Returns the config class of the text model, or `config_class` itself if it has no separate text model."""
    if "text_config" not in getattr(config_class, "sub_configs", {}):
        return config_class
    return type(config_class().text_config)


def defaults_of(kind):
    config_class = CONFIG_MAPPING[kind]
    text = text_class_of(config_class)
    if text is not config_class:
        return text.model_type
    return {name: field.default for name, field in sorted(fields_of(config_class).items())
            if default_key.fullmatch(name) and isinstance(field.default, int)}


def tiny(config_class, numbers):
    known = {name: number for name, number in numbers.items()
             if name in fields_of(config_class) or name in config_class.attribute_map}
    if isinstance(getattr(config_class, "head_dim", None), property):
        known.pop("head_dim", None)
    if "linear_num_key_heads" in fields_of(config_class):
        known["layer_types"] = ["linear_attention", "full_attention"]
    return known


def config_of(kind):
    config_class = CONFIG_MAPPING[kind]
    if "text_config" not in getattr(config_class, "sub_configs", {}):
        return config_class(**tiny(config_class, sizes), **switches.get(kind, {}))
    parts = {}
    for place in config_class.sub_configs:
        part = getattr(config_class(), place, None)
        if part is None:
            continue
        parts[place] = {"model_type": part.model_type, **tiny(type(part), sizes if place == "text_config" else vision)}
        if place == "text_config" and "qwen" in kind:
            parts[place]["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 0],
                                               "rope_theta": 10000.0}
    return config_class(**parts)


def saved(model):
    """Returns the config and the shapes of the tensors as save_pretrained writes them."""
    shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with open(f"{folder}/config.json") as file:
            config = json.load(file)
        for name in os.listdir(folder):
            if not name.endswith(".safetensors"):
                continue
            with open(f"{folder}/{name}", "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            header.pop("__metadata__", None)
            shapes.update({tensor: entry["shape"] for tensor, entry in header.items()})
    return config, shapes


def without_numbers(name):
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def first_of_each(shapes):
    first = {}
    for name in sorted(shapes, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        first.setdefault(without_numbers(name), (name, shapes[name]))
    return {name: shape for name, shape in sorted(first.values())}


def classes_of(config):
    """Returns the class of published models of this kind, then all other classes."""
    first = ("SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM")
    if type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING:
        first = first[4:]
    found = []
    mappings = [f"MODEL_FOR_{task}_MAPPING" for task in first]
    mappings += [name for name in dir(modeling_auto) if re.fullmatch("MODEL_(FOR_.*_)?MAPPING", name)]
    for name in mappings:
        mapping = getattr(modeling_auto, name)
        if type(config) not in mapping:
            continue
        classes = mapping[type(config)]
        found += classes if isinstance(classes, tuple) else [classes]
    return list(dict.fromkeys(found))


def parallel_layers_of(kind):
    # The matrices of GPT-2 are transposed: inputs by outputs.
    prefix = "conv1d_" if kind == "gpt2" else ""
    return {name: prefix + style for names in parallel.get(kind, ())
            for style, modules in zip(("colwise", "rowwise"), names) for name in modules}


def facts_of(kind):
    config = config_of(kind)
    kinds = classes_of(config)
    model = kinds[0](config)
    given, shapes = saved(model)
    keep = {"architectures", "model_type", *switches.get(kind, {})}
    place = given.get("text_config", given)
    numbers = {name: number for name, number in place.items() if name in sizes or name == "head_dim"}
    tensors = first_of_each(shapes)
    config = {name: given[name] for name in given if name in keep}
    if place is given:
        config.update(numbers)
    else:
        config["text_config"] = {"model_type": place["model_type"], **numbers}
    known = {without_numbers(name) for name in tensors}
    others = set()
    for other in kinds[1:]:
        try:
            found = first_of_each(saved(other(config_of(kind)))[1])
        except Exception as error:  # some classes of a mapping need another config
            print(f"{kind}: left out {other.__name__}: {error}", file=sys.stderr)
            continue
        others.update(name for name in found if without_numbers(name) not in known)
    return {"config": config, "tensors": tensors, "others": sorted(first_of_each(dict.fromkeys(others))),
            "tp_plan": dict(sorted((getattr(model, "_tp_plan", None) or {}).items())),
            "parallel_layers": parallel_layers_of(kind)}


def main(source):
    with open(f"{source}/src/checkpoint/plan/builtin/models.json") as file:
        plans = json.load(file)
    kinds = sorted({kind for models in plans.values() if isinstance(models, dict) for kind in models})
    texts = {text_class_of(CONFIG_MAPPING[kind]).model_type for kind in kinds}
    defaults = {"comment": f"Defaults of the config classes of transformers {transformers.__version__}, by model type: "
                           "what a config.json may omit. The type of a model with towers stands for that of its text "
                           "model. tests/interop/transformers_facts.py writes this file."}
    defaults.update({kind: defaults_of(kind) if kind in CONFIG_MAPPING else {} for kind in sorted(texts | set(kinds))})
    with open(f"{source}/src/checkpoint/plan/builtin/defaults.json", "w") as file:
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in defaults.items() if value]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    with open(f"{source}/tests/data/architectures.json", "w") as file:
        file.write('{\n"transformers": ' + json.dumps(transformers.__version__) + ',\n"models": {\n')
        for kind in kinds:
            print(kind, flush=True)
            lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in facts_of(kind).items()]
            file.write(f"{json.dumps(kind)}: {{\n" + ",\n".join(lines) + ("\n},\n" if kind != kinds[-1] else "\n}\n"))
        file.write("}\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
