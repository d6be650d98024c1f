# SPDX-License-Identifier: Apache-2.0
"""Exports of models that PyTorch has distributed, and the programs of the page about training scripts. In the long form
(MUSTER_TEST_ALL=1).
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="there is no PyTorch here")
if not os.environ.get("MUSTER_TEST_ALL"):
    pytest.skip("in the long form: MUSTER_TEST_ALL=1", allow_module_level=True)

import muster
from ranks import run

SOURCE = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(SOURCE / "tests/docs"))
import pages

START = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(os.environ["TEST_STORE"], size), rank=rank, world_size=size)
out = os.environ["TEST_OUT"]
class Block(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.up = nn.Linear(columns, rows)
        self.down = nn.Linear(rows, columns, dtype=torch.bfloat16)
        self.norm = nn.Parameter(torch.ones(columns))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.tensor([3, 1]))
def blocks():
    model = nn.ModuleList([Block(10, 7), Block(13, 5), Block(1, 2), Block(8, 8)])
    torch.manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape))
    return model
def expected():
    return {name: each.detach().clone() for name, each in blocks().state_dict().items()}
def parallel(model, mesh):
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
def shard(model, mesh=None):
    # FSDP2 cannot shard scalars.
    for each in model:
        fully_shard(each, mesh=mesh, ignored_params={each.scale})
"""

LAYOUTS = {
    "fsdp2": "shard(model)",
    "hsdp": 'shard(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner")))',
    "tensor parallel": 'parallel(model, init_device_mesh("cpu", (size,)))',
    "fsdp2 over tensor parallel": """
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
parallel(model, mesh["inner"])
shard(model, mesh["outer"])
""",
}
FORMS = {
    "blocking": "muster.export_model(model.state_dict(), out, group=dist.group.WORLD, force=True)",
    "asynchronous": """
work = muster.export_model(model.state_dict(), out, group=dist.group.WORLD, force=True, wait=False)
with torch.no_grad():
    for each in model.parameters():
        each.zero_()
del model
work.get()
""",
    "by layers": "muster.export_model(({f'{number}.{name}': value for name, value in each.state_dict().items()} for number, each in enumerate(model)), out, force=True)",
}
CHECK = """
if rank == 0:
    from safetensors.torch import load_file
    import glob
    found = {name: value for path in glob.glob(out + "/*.safetensors") for name, value in load_file(path).items()}
    whole = expected()
    tell([sorted(set(found) ^ set(whole)), [name for name in whole if not (torch.equal(whole[name], found[name]) and whole[name].dtype == found[name].dtype)]])
dist.destroy_process_group()
"""


def environment_of(tmp_path):
    return {"TEST_STORE": str(tmp_path / "store"), "TEST_OUT": str(tmp_path / "out"), "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_distributed_model(layout, form, size, tmp_path):
    source = "\n".join([START, "model = blocks()", LAYOUTS[layout], FORMS[form], CHECK])
    assert run(source, size, longest=300, environment=environment_of(tmp_path))[0] == [[], []]


def programs_of(page):
    return {block.file: block.text for block in pages.blocks_of(SOURCE / page, page) if block.file}


PROGRAMS = programs_of("docs/howto/export-from-training.md")


def torchrun(folder, ranks, source, *more):
    (folder / "program.py").write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "program.py", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "MUSTER_TIMEOUT": "120"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def needs(*packages):
    return pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in packages), reason=f"{sys.executable} has no {' or '.join(packages)}")


@pytest.mark.parametrize("program, ranks, folder, tensors", [("train.py", 4, "trained", 4), ("parallel.py", 4, "parallel", 4)])
def test_programs_of_the_page(program, ranks, folder, tensors, tmp_path):
    torchrun(tmp_path, ranks, PROGRAMS[program])
    assert len(muster.show(tmp_path / folder)["tensors"]) == tensors and muster.verify(tmp_path / folder)["good"]


LOGITS = """
import torch
from transformers import AutoModelForCausalLM
def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(2, 6)).logits
"""


def check_logits(model_folder, logits_file):
    """Checks that transformers load the model, with these logits."""
    exec(LOGITS, globals())
    model, info = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(model), torch.load(logits_file))


@needs("transformers")
@pytest.mark.parametrize("size", [2, 4])
def test_transformers_load_the_export(size, tmp_path):
    """The logits of the loaded model are equal to those of the model before FSDP2 distributed it."""
    before = 'torch.save(logits(model), "before.pt") if dist.get_rank() == 0 else None\n'
    torchrun(tmp_path, size, LOGITS + PROGRAMS["llama.py"].replace("for layer in", before + "for layer in"))
    check_logits(tmp_path / "llama", tmp_path / "before.pt")


TENSOR_PARALLEL = """
import torch.distributed as dist
import muster
from transformers.distributed import DistributedConfig
dist.init_process_group("gloo")
parallel = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained("before", distributed_config=parallel)
state = model.state_dict()
assert any(value.to_local().shape != value.shape for value in state.values() if hasattr(value, "to_local"))
muster.export_model(state, "after", base_model="before")
dist.destroy_process_group()
"""


@needs("transformers")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_tensor_parallelism_of_transformers(family, size, tmp_path):
    """The export of a model that transformers have distributed is the model that they have loaded."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=12, vocab_size=100, tie_word_embeddings=family == "Gemma2"
    )
    exec(LOGITS, globals())
    model = getattr(transformers, family + "ForCausalLM")(config)
    model.save_pretrained(tmp_path / "before")
    torch.save(logits(model), tmp_path / "before.pt")
    torchrun(tmp_path, size, LOGITS + TENSOR_PARALLEL)
    assert muster.diff(tmp_path / "before", tmp_path / "after")["same"]
    check_logits(tmp_path / "after", tmp_path / "before.pt")


@needs("transformers", "accelerate")
def test_the_callback_of_the_trainer(tmp_path):
    """The last export of a Trainer over two ranks is equal to the checkpoint that the Trainer saves."""
    torchrun(
        tmp_path,
        2,
        PROGRAMS["callback.py"]
        + """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=50, tie_word_embeddings=False)
data = [{"input_ids": torch.arange(8) + step, "labels": torch.arange(8) + step} for step in range(8)]
arguments = TrainingArguments("trainer", use_cpu=True, max_steps=2, save_steps=1, per_device_train_batch_size=1, report_to=[], disable_tqdm=True)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[LiveExport()]).train()
""",
    )
    assert muster.diff(tmp_path / "trainer/export-2/model.safetensors", tmp_path / "trainer/checkpoint-2/model.safetensors")["same"]


@needs("accelerate")
def test_accelerate(tmp_path):
    torchrun(tmp_path, 2, PROGRAMS["accelerated.py"])
    assert len(muster.show(tmp_path / "accelerated")["tensors"]) == 2


@needs("accelerate")
def test_fsdp2_of_accelerate(tmp_path):
    """The page's program with FSDP2, which accelerate supports only on devices unless its state is changed."""
    begin = "accelerator = Accelerator(cpu=True)\n"
    change = """
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
accelerator.state.distributed_type = DistributedType.FSDP
"""
    end = "assert all(hasattr(value, 'placements') for value in model.state_dict().values())\n"
    torchrun(tmp_path, 2, PROGRAMS["accelerated.py"].replace(begin, begin + change).replace("accelerator.end", end + "accelerator.end"))
    assert len(muster.show(tmp_path / "accelerated")["tensors"]) == 2


@needs("torchtitan")
@pytest.mark.parametrize("size", [2, 4])
def test_torchtitan(size, tmp_path):
    """The page's function, with torchtitan's adapter for Llama and a model that FSDP2 has distributed."""
    source = """
import types
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
attention = types.SimpleNamespace(n_heads=8, n_kv_heads=4, head_dim=None)
config = types.SimpleNamespace(layers=[types.SimpleNamespace(attention=attention)], dim=32, enable_weight_tying=False)
adapter = Llama3StateDictAdapter(config, None)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        for name, shape in (("attention.qkv_linear.wq", (32, 32)), ("attention.qkv_linear.wk", (16, 32)), ("feed_forward.w1", (50, 32)), ("attention_norm", (32,))):
            inner = self
            for part in f"layers.0.{name}".split("."):
                inner.add_module(part, getattr(inner, part, nn.Module()))
                inner = getattr(inner, part)
            inner.weight = nn.Parameter(torch.randn(shape))
def expected():
    return {name: value.detach().contiguous() for name, value in adapter.to_hf(Model().state_dict()).items()}
model = Model()
fully_shard(model)
trainer = types.SimpleNamespace(model_parts=[model], checkpointer=types.SimpleNamespace(sd_adapter=adapter))
"""
    source = "\n".join([START, PROGRAMS["titan.py"], source, "export(trainer, out)", CHECK])
    assert run(source, size, longest=300, environment=environment_of(tmp_path))[0] == [[], []]
