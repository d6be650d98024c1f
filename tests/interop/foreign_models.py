# SPDX-License-Identifier: Apache-2.0
"""Exports tiny random Llama models in the formats of training programs: torch.distributed.checkpoint of FSDP2 on 2 and 4
ranks with uneven parts, and pytorch_model.bin. With a base, every tensor that transformers loads from the export must be
equal bit for bit, and the logits must be equal.

Argument: the program muster. Exit status: 0, 1, or 77 if torch or transformers cannot be imported (skipped).
"""
import os
import subprocess
import sys
import tempfile

from checks import check

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"
try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError as error:
    print(f"SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has torch and transformers", file=sys.stderr)
    sys.exit(77)


def make_model(is_tied):
    """Returns a model with sizes that no number of ranks divides."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=97, hidden_size=54, intermediate_size=71, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, head_dim=10, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=is_tied), dtype=torch.bfloat16)


def save_on_rank(rank, ranks, is_tied, work):
    dist.init_process_group("gloo", init_method=f"file://{work}/meeting", rank=rank, world_size=ranks)
    model = make_model(is_tied)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=f"{work}/save")
    dist.destroy_process_group()


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 19).reshape(1, 16), use_cache=False).logits


def check_export(muster, what, source, is_tied, work, *options):
    model = make_model(is_tied)
    model.config.dtype = "float32"  # which the export must correct
    model.config.save_pretrained(f"{work}/base")
    out = f"{work}/out"
    done = subprocess.run([muster, "export", source, "--base-model", f"{work}/base", "--out", out, *options],
                          capture_output=True, text=True)
    check(done.returncode == 0, f"{what}: status {done.returncode}: {done.stdout}{done.stderr}")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    check(not any(info.values()), f"{what}: {info}")
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        check(torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype, f"{what}: {name} differs")
    check(torch.equal(logits_of(loaded), logits_of(model)), f"{what}: other logits")
    print(f"{what}: {len(state)} tensors and the logits are the same", flush=True)


def main():
    muster = sys.argv[1]
    for ranks, is_tied in ((2, False), (4, True)):
        with tempfile.TemporaryDirectory(prefix="muster-models-") as work:
            mp.spawn(save_on_rank, (ranks, is_tied, work), ranks)
            check_export(muster, f"FSDP2 on {ranks} ranks", f"{work}/save", is_tied, work, "--key", "model")
    with tempfile.TemporaryDirectory(prefix="muster-models-") as work:
        os.mkdir(f"{work}/save")
        # Does what save_pretrained(safe_serialization=False) did before transformers 5.
        torch.save(make_model(True).state_dict(), f"{work}/save/pytorch_model.bin")
        check_export(muster, "pytorch_model.bin", f"{work}/save", True, work)


if __name__ == "__main__":
    main()
