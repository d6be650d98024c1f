# SPDX-License-Identifier: Apache-2.0
"""Cuts tiny random models of transformers into shards, exports them, and loads them with transformers.

For each architecture, AutoModel must load the original tensors, with none missing and none unexpected. muster verify must
report the export as good, and muster diff must report it as the same.
Argument: the program muster. Exit status: 0, 1, or 77 if torch or transformers cannot be imported (skipped).
"""
import json
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
    from transformers_facts import config_of
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has torch and transformers", file=sys.stderr)
    sys.exit(77)

muster = sys.argv[1]
masked = ("albert", "bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
without_logits = ("whisper", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # tiny models of these types do not run

# Model types and layouts.
models = {
    "llama": ["2", "3", "tp=2,pp=2"],
    "qwen2": ["4"],
    "qwen3": ["7"],
    "gemma2": ["3"],
    "phi3": ["2", "3", "7"],
    "gpt_neox": ["3", "tp=2,pp=2"],
    "bert": ["2", "3", "7"],
    "roberta": ["2"],
    "mixtral": ["2", "tp=2,pp=2,ep=2"],
    "qwen3_moe": ["tp=1,pp=2,ep=2"],
    "deepseek_v3": ["3", "tp=2,ep=2"],
    "gpt_oss": ["2", "tp=2,ep=2"],
    "gpt2": ["2", "tp=2,pp=2"],
    "falcon": ["2"],
    "cohere": ["4"],
    "qwen3_next": ["2", "4"],
}
# With MUSTER_TEST_ALL: all other types that --plan auto knows.
if os.environ.get("MUSTER_TEST_ALL"):
    with open(f"{os.path.dirname(__file__)}/../../src/checkpoint/plans/models.json") as file:
        plans = json.load(file)
    for plan, kinds in plans.items():
        stages = [] if plan in ("comment", "t5", "whisper") else ["tp=2,pp=2"]
        for kind in kinds if plan != "comment" else ():
            models.setdefault(kind, ["2", "4", *stages])


def run(*arguments):
    done = subprocess.run([muster, *arguments], capture_output=True, text=True)
    check(done.returncode == 0, f"muster {' '.join(arguments)}: status {done.returncode}: {done.stdout}{done.stderr}")


def logits_of(model, kind):
    """Returns the logits of a few tokens; None if a model needs other inputs, or other sizes."""
    words = torch.arange(3, 19).reshape(1, 16)
    if kind in without_logits or hasattr(model.config, "vision_config"):
        return None
    more = {"decoder_input_ids": words} if kind == "t5" else {}
    with torch.no_grad():
        return model.eval()(input_ids=words, use_cache=False, **more).logits


def check_model(kind, layouts, work):
    config = config_of(kind)
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
        run("shard", given, "--to", layout, "--plan", "auto", "--out", shards)
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
for kind, layouts in models.items():
    if kind not in CONFIG_MAPPING:
        print(f"not tried: this transformers ({transformers.__version__}) has no {kind}")
        continue
    with tempfile.TemporaryDirectory(prefix="muster-models-") as work:
        check_model(kind, layouts, work)
    known += 1
    print(f"{kind}: {', '.join(layouts)}", flush=True)
check(known >= 5, "too few of the models are known here")
print(f"{known} models, {checks.count} checks")
