#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes samples of third-party checkpoints with the software that writes them: foreign_samples.py DIR [NAME...].

Each sample is DIR/NAME/in, a file or a directory, beside DIR/NAME/expected.safetensors with the same tensors whole.
tests/data/foreign was made with this script, with small sizes. It needs torch, and some samples need the packages
that they import.
"""
import os
import pathlib
import shutil
import sys

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from safetensors.torch import save_file
except ImportError as error:
    print(f'SKIPPED: {error}; MUSTER_TEST_PYTHON names a Python that has torch', file=sys.stderr)
    sys.exit(77)


def tensor(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def state(rows=7):
    return {
        'embed.weight': tensor(1, 2 * rows, 4),
        'layers.0.attn.weight': tensor(2, rows, 6, dtype=torch.bfloat16),
        'layers.0.attn.bias': tensor(3, rows),
        'layers.1.mlp.weight': tensor(4, 5, rows, dtype=torch.float16),
        'norm.weight': tensor(5, 1),
    }


def write(directory, expected):
    save_file({name: value.contiguous().clone() for name, value in expected.items()},
              directory / 'expected.safetensors')


# Samples saved by one process.

def kinds():
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    out = {
        'weight': weight, 'tied': weight, 'turned': weight.t(), 'sliced': weight[1:, ::2],
        'expanded': torch.ones(1).expand(4, 5), 'scalar': torch.tensor(3.5), 'empty': torch.empty(0, 5),
        'parameter': torch.nn.Parameter(torch.ones(2)),
    }
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
                  torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
                  torch.float8_e5m2, torch.complex64):
        out[str(dtype).split('.')[1]] = torch.arange(6).to(dtype)
    return out


def torch_zip(directory):
    torch.save({**kinds(), 'step': 7}, directory / 'in')
    write(directory, {name: value.detach() for name, value in kinds().items()})


def torch_legacy(directory):
    torch.save({'state_dict': kinds(), 'args': {'lr': 0.1}}, directory / 'in', _use_new_zipfile_serialization=False)
    write(directory, {name: value.detach() for name, value in kinds().items()})


def torch_model(directory):
    import json
    model = state()
    files = {name: f'pytorch_model-0000{1 + i % 2}-of-00002.bin' for i, name in enumerate(model)}
    (directory / 'in').mkdir()
    for file in set(files.values()):
        torch.save({name: model[name] for name in model if files[name] == file}, directory / 'in' / file)
    (directory / 'in' / 'pytorch_model.bin.index.json').write_text(
        json.dumps({'metadata': {'total_size': 1}, 'weight_map': files}))
    (directory / 'in' / 'config.json').write_text('{"model_type": "test"}')
    write(directory, model)


# Samples saved by several processes.

def ranks(function, count, directory, *arguments):
    mp.spawn(in_rank, (function, count, directory, *arguments), count)


def in_rank(rank, function, count, directory, *arguments):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=os.environ['SAMPLES_PORT'])
    dist.init_process_group('gloo', rank=rank, world_size=count)
    function(rank, count, directory, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def sharded(mesh_shape, names, placements):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    mesh = init_device_mesh('cpu', mesh_shape, mesh_dim_names=names)
    return {name: distribute_tensor(value, mesh, placements(name, value)) for name, value in state().items()}


def save_dcp(rank, count, directory, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard
    if kind == 'tp':
        parts = sharded((2, 2), ('dp', 'tp'), lambda name, value: (
            Shard(0), Shard(value.dim() - 1) if value.dim() > 1 else Replicate()))
    elif kind == 'fsdp_tp':
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 5))
        torch.manual_seed(7)
        for value in model.parameters():
            torch.nn.init.normal_(value)
        full = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize_module(model, mesh['tp'], {'0': ColwiseParallel(), '1': RowwiseParallel()})
        fully_shard(model, mesh=mesh['dp'])
        parts = model.state_dict()
        if rank == 0:
            write(directory, {'model.' + name: value for name, value in full.items()})
    else:
        parts = sharded((count,), ('dp',), lambda name, value: (Shard(0),))
    writer = None
    if kind == 'threads':
        writer = dcp.FileSystemWriter(directory / 'in', thread_count=2, single_file_per_rank=False)
    if kind == 'zstd':
        from torch.distributed.checkpoint._extension import ZStandard
        writer = dcp.FileSystemWriter(directory / 'in', _extensions=[ZStandard()])
    if kind == 'safetensors':
        from torch.distributed.checkpoint.filesystem import SerializationFormat
        writer = dcp.FileSystemWriter(directory / 'in', serialization_format=SerializationFormat.SAFETENSORS)
    if kind == 'huggingface':
        writer = dcp.HuggingFaceStorageWriter(str(directory / 'in'), save_distributed=True)
        dcp.save(parts, storage_writer=writer)
    else:
        extra = {'model': parts, 'step': 3}
        if kind == 'turned':
            extra['model'] = {**parts, 'turned': tensor(9, 4, 6).t()}
        dcp.save(extra, storage_writer=writer, checkpoint_id=str(directory / 'in') if writer is None else None,
                 **({'use_collectives': False} if kind == 'no_collectives' else {}))


def scalars():
    """Tensors without dimensions or elements, beside sharded and replicated ones."""
    return {
        'scale': torch.tensor(2.5), 'steps': torch.tensor(7), 'empty': torch.empty(0, 4),
        'replicated': tensor(6, 3), 'sharded': tensor(7, 5, 4), 'small': tensor(8, 1, 2, dtype=torch.bfloat16),
    }


def save_scalars(rank, count, directory, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh('cpu', (count,), mesh_dim_names=('dp',))
    parts = scalars()
    for name, placement in (('sharded', Shard(0)), ('small', Shard(0)), ('steps', Replicate())):
        parts[name] = distribute_tensor(parts[name], mesh, [placement])
    where = directory / 'in'
    if kind == 'fsdp':
        where.mkdir(exist_ok=True)
        torch.save(parts, where / f'model_world_size_{count}_rank_{rank}.pt')
        return
    writer = {
        'safetensors': lambda: dcp.FileSystemWriter(where, serialization_format=SerializationFormat.SAFETENSORS),
        'huggingface': lambda: dcp.HuggingFaceStorageWriter(str(where), save_distributed=True),
    }.get(kind, lambda: dcp.FileSystemWriter(where))()
    dcp.save(parts, storage_writer=writer, use_collectives=kind != 'no_collectives')


def scalars_sample(kind):
    def make(directory):
        ranks(save_scalars, 2, directory, kind)
        write(directory, scalars())
    return make


def dcp_sample(kind, count):
    def make(directory):
        ranks(save_dcp, count, directory, kind)
        if kind == 'huggingface':
            write(directory, state())
        elif kind != 'fsdp_tp':
            model = state()
            if kind == 'turned':
                model['turned'] = tensor(9, 4, 6).t()
            write(directory, {'model.' + name: value for name, value in model.items()})
    return make


def save_torch_dist(rank, count, directory):
    import io
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh('cpu', (count,), mesh_dim_names=('tp',))
    placements = {'fc1': Shard(1), 'fc2': Shard(2), 'embeddings': Shard(0)}
    parts = {name: distribute_tensor(value, mesh, [next((p for key, p in placements.items() if key in name), Replicate())])
             for name, value in torch_dist_state().items()}
    parts[f'decoder.layers.mlp.linear_fc1._extra_state/shard_{rank}_{count}'] = io.BytesIO(b'never opened')
    parts['optimizer.state.exp_avg.output_layer.weight'] = tensor(9, 2, 2, 5)
    dcp.save(parts, checkpoint_id=str(directory / 'in'))


def torch_dist_state():
    # Layers are stacked along a new first axis.
    return {
        'embedding.word_embeddings.weight': tensor(1, 8, 4, dtype=torch.bfloat16),
        'decoder.layers.input_layernorm.weight': tensor(2, 3, 4),
        'decoder.layers.mlp.linear_fc1.weight': tensor(3, 3, 12, 4, dtype=torch.bfloat16),
        'decoder.layers.mlp.linear_fc2.weight': tensor(4, 3, 4, 6, dtype=torch.bfloat16),
    }


def torch_dist(directory):
    """Adds Megatron's metadata to a save of torch. Megatron is not needed."""
    import argparse
    import json
    import pickle
    ranks(save_torch_dist, 2, directory)
    (directory / 'in' / 'metadata.json').write_text(json.dumps({
        'sharded_backend': 'torch_dist', 'sharded_backend_version': 1, 'common_backend': 'torch',
        'common_backend_version': 1}))
    torch.save({'args': argparse.Namespace(num_layers=3), 'iteration': 10}, directory / 'in' / 'common.pt')
    metadata = pickle.loads((directory / 'in' / '.metadata').read_bytes())
    metadata.mcore_data = {'optimizer.state.exp_avg.output_layer.weight': {'nd_reformulated_orig_global_shape': (4, 5)}}
    (directory / 'in' / '.metadata').write_bytes(pickle.dumps(metadata, protocol=4))
    write(directory, torch_dist_state())


def save_fsdp(rank, count, directory):
    from torch.distributed.tensor import Shard
    parts = sharded((count,), ('fsdp',), lambda name, value: (Shard(0),))
    (directory / 'in').mkdir(exist_ok=True)
    torch.save(parts, directory / 'in' / f'model_world_size_{count}_rank_{rank}.pt')


def fsdp(directory):
    ranks(save_fsdp, 3, directory)
    write(directory, state())


def save_fsdp_mesh(rank, count, directory, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    (directory / 'in').mkdir(exist_ok=True)
    if kind == 'hsdp':
        parts = sharded((2, count // 2), ('replicate', 'shard'), lambda name, value: (Replicate(), Shard(0)))
    else:  # _StridedShard
        mesh = init_device_mesh('cpu', (2, count // 2), mesh_dim_names=('dp', 'tp'))
        model = torch.nn.ModuleDict({name.replace('.', '_'): torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
                                     for name, value in state().items() if value.dim() == 2})
        for name, value in state().items():
            if value.dim() == 2:
                layer = model[name.replace('.', '_')].to(value.dtype)
                with torch.no_grad():
                    layer.weight.copy_(value)
                fully_shard(parallelize_module(layer, mesh['tp'], ColwiseParallel()), mesh=mesh['dp'])
        parts = {name: model[name.replace('.', '_')].weight.detach() for name, value in state().items()
                 if value.dim() == 2}
    torch.save(parts, directory / 'in' / f'model_world_size_{count}_rank_{rank}.pt')


def fsdp_mesh(kind):
    def make(directory):
        ranks(save_fsdp_mesh, 4, directory, kind)
        write(directory, {name: value for name, value in state().items() if kind == 'hsdp' or value.dim() == 2})
    return make


def save_fsdp1(rank, count, directory):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        parts = model.state_dict()
    (directory / 'in').mkdir(exist_ok=True)
    torch.save(parts, directory / 'in' / f'model_world_size_{count}_rank_{rank}.pt')
    if rank == 0:
        write(directory, full)


def save_zero(rank, count, directory, stage):
    os.environ.update(DS_ACCELERATOR='cpu', RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    import deepspeed
    deepspeed.init_distributed('gloo')

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(7, 5)
            self.b = torch.nn.Linear(5, 3)
            self.norm = torch.nn.BatchNorm1d(3)
            self.fixed = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
            self.tied = self.a

    torch.manual_seed(0)
    model = Model()
    engine = deepspeed.initialize(
        model=model, model_parameters=[value for value in model.parameters() if value.requires_grad],
        config={'train_micro_batch_size_per_gpu': 2, 'bf16': {'enabled': True},
                'zero_optimization': {'stage': stage, 'stage3_param_persistence_threshold': 0},
                'optimizer': {'type': 'Adam', 'params': {'torch_adam': True, 'lr': 1e-3}}})[0]
    engine.save_checkpoint(str(directory / 'in'), tag='global_step1')


def zero(stage):
    def make(directory):
        ranks(save_zero, 2, directory, stage)
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        whole = get_fp32_state_dict_from_zero_checkpoint(str(directory / 'in'))
        folder = directory / 'in' / 'global_step1'
        first = 'zero_pp_rank_0_' if stage == 3 else ''
        model = torch.load(folder / f'{first}mp_rank_00_model_states.pt', weights_only=False)
        # Buffers keep the model's dtype here.
        whole.update({name: model['module'][name] for name in model['buffer_names']})
        if stage < 3:  # zero_to_fp32 loses the other names of tied weights, and in stage 1 untrained tensors
            module = model['module']
            same = {value.data_ptr(): name for name, value in module.items() if name in whole}
            for name, value in module.items():
                if name not in whole:
                    whole[name] = whole[same[value.data_ptr()]].clone() if value.data_ptr() in same else value
        write(directory, whole)
        for script in (directory / 'in').glob('*.py'):
            script.unlink()
    return make


SAMPLES = {
    'torch_zip': torch_zip,
    'torch_legacy': torch_legacy,
    'torch_model': torch_model,
    'dcp': dcp_sample('plain', 3),
    'dcp_tp': dcp_sample('tp', 4),
    'dcp_fsdp_tp': dcp_sample('fsdp_tp', 4),
    'dcp_threads': dcp_sample('threads', 2),
    'dcp_turned': dcp_sample('turned', 2),
    'dcp_no_collectives': dcp_sample('no_collectives', 2),
    'dcp_zstd': dcp_sample('zstd', 2),
    'dcp_safetensors': dcp_sample('safetensors', 2),
    'dcp_huggingface': dcp_sample('huggingface', 2),
    'dcp_scalars': scalars_sample('plain'),
    'dcp_scalars_no_collectives': scalars_sample('no_collectives'),
    'dcp_scalars_safetensors': scalars_sample('safetensors'),
    'dcp_scalars_huggingface': scalars_sample('huggingface'),
    'fsdp_scalars': scalars_sample('fsdp'),
    'torch_dist': torch_dist,
    'fsdp': fsdp,
    'fsdp_hsdp': fsdp_mesh('hsdp'),
    'fsdp_tp': fsdp_mesh('tp'),
    'zero1': zero(1),
    'zero2': zero(2),
    'zero3': zero(3),
    'fsdp1': lambda directory: ranks(save_fsdp1, 2, directory),
}


def main():
    out = pathlib.Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or SAMPLES):
        os.environ['SAMPLES_PORT'] = str(29600 + os.getpid() % 300 + number)
        directory = out / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            SAMPLES[name](directory)
        except Exception as error:  # a sample that this machine cannot make must not hide the others
            shutil.rmtree(directory, ignore_errors=True)
            print(f'{name}: not made: {str(error).strip().splitlines()[-1]}')
            continue
        print(f'{name}: made')


if __name__ == '__main__':
    main()
