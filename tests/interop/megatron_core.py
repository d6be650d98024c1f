#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports saves of Megatron-Core. Every tensor must equal Megatron's whole tensor, and the logits those of its own model:
megatron_core.py PROGRAM [DIR]. With DIR the samples are kept there; tests/data/megatron was made in this way.

Needs torch, transformers and megatron-core, which runs here without a GPU.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings
from unittest import mock

warnings.filterwarnings('ignore')
try:
    import psutil  # noqa: F401: without it Megatron's save waits forever
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    # Replaces functions that need a device.
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = mock.MagicMock()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device('cpu')
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as missing:
    print(f'SKIPPED: {missing}; MUSTER_TEST_PYTHON names a Python that has it', file=sys.stderr)
    sys.exit(77)

CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
moe_utils.te_general_gemm = None

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, EXPERTS, VOCABULARY, LENGTH = 2, 16, 4, 2, 4, 24, 4, 32, 16
CASES = {'dense': (2, 2, 1), 'mixture': (2, 1, 2)}  # sizes of tensor, pipeline and expert parallelism


def hf_config(kind):
    config = {
        'hidden_size': HIDDEN, 'intermediate_size': FFN, 'num_hidden_layers': LAYERS, 'num_attention_heads': HEADS,
        'num_key_value_heads': GROUPS, 'head_dim': HEAD, 'vocab_size': VOCABULARY, 'max_position_embeddings': LENGTH,
        'rms_norm_eps': 1e-6, 'rope_theta': 10000.0, 'hidden_act': 'silu', 'tie_word_embeddings': False,
        'torch_dtype': 'float32',
    }
    if kind == 'dense':
        return {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], **config}
    return {'model_type': 'qwen3_moe', 'architectures': ['Qwen3MoeForCausalLM'], **config,
            'moe_intermediate_size': FFN, 'num_experts': EXPERTS, 'num_experts_per_tok': 2, 'norm_topk_prob': True,
            'decoder_sparse_step': 1, 'mlp_only_layers': []}


def model(kind, tensor, pipeline, expert):
    parallel.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    of_experts = {} if kind == 'dense' else {
        'num_moe_experts': EXPERTS, 'moe_router_topk': 2, 'moe_ffn_hidden_size': FFN,
        'moe_token_dispatcher_type': 'allgather'}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=FFN, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization='RMSNorm', layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, **of_experts)
    layer = get_gpt_layer_local_spec(
        num_experts=None if kind == 'dense' else EXPERTS, moe_grouped_gemm=False, normalization='RMSNorm',
        qk_layernorm=kind != 'dense')
    return GPTModel(
        config=config, transformer_layer_spec=layer, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=parallel.is_pipeline_first_stage(), post_process=parallel.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type='rope', rotary_percent=1.0)


def save(rank, made, folder):
    """On each rank: saves torch_dist, and rank files in the format of Megatron-LM."""
    tensor, pipeline, expert = sizes = CASES[folder.name]
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    if rank == 0:
        (folder / 'dist').mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(made.sharded_state_dict(), str(folder / 'dist'))
    dist.barrier()
    # Loading makes replicated ranks equal.
    made.load_state_dict(dist_checkpointing.load(made.sharded_state_dict(), str(folder / 'dist')))
    name = f'mp_rank_{parallel.get_tensor_model_parallel_rank():02d}'
    if pipeline > 1:
        name += f'_{parallel.get_pipeline_model_parallel_rank():03d}'
    if expert > 1:
        name += f'_{parallel.get_expert_model_parallel_rank():03d}'
    mine = folder / 'ranks' / 'iter_0000100' / name
    mine.mkdir(parents=True)
    keys = ('tensor_model_parallel_size', 'pipeline_model_parallel_size', 'expert_model_parallel_size')
    torch.save({'args': argparse.Namespace(params_dtype=torch.float32, **dict(zip(keys, sizes))),
                'checkpoint_version': 3.0, 'iteration': 100, 'model': made.state_dict_for_save_checkpoint()},
               mine / 'model_optim_rng.pt')
    (folder / 'ranks' / 'latest_checkpointed_iteration.txt').write_text('100')


def huggingface(state):
    """Returns the whole state with Hugging Face names."""
    out = {'model.embed_tokens.weight': state['embedding.word_embeddings.weight'],
           'model.norm.weight': state['decoder.final_layernorm.weight'], 'lm_head.weight': state['output_layer.weight']}
    for layer in range(LAYERS):
        mine = {name.split('.', 3)[3]: value for name, value in state.items()
                if value is not None and name.startswith(f'decoder.layers.{layer}.')}
        to = f'model.layers.{layer}.'
        out[to + 'input_layernorm.weight'] = mine['input_layernorm.weight']
        out[to + 'post_attention_layernorm.weight'] = mine['pre_mlp_layernorm.weight']
        out[to + 'self_attn.o_proj.weight'] = mine['self_attention.linear_proj.weight']
        groups = mine['self_attention.linear_qkv.weight'].reshape(GROUPS, HEADS // GROUPS + 2, HEAD, HIDDEN)
        for name, part in (('q', groups[:, :-2]), ('k', groups[:, -2]), ('v', groups[:, -1])):
            out[to + f'self_attn.{name}_proj.weight'] = part.reshape(-1, HIDDEN)
        for name in 'qk':
            if f'self_attention.{name}_layernorm.weight' in mine:
                out[to + f'self_attn.{name}_norm.weight'] = mine[f'self_attention.{name}_layernorm.weight']
        if 'mlp.router.weight' in mine:
            out[to + 'mlp.gate.weight'] = mine['mlp.router.weight']
        for key, value in mine.items():
            if 'linear_fc' not in key:
                continue
            at = to + 'mlp.' + (f'experts.{key.split(".")[3]}.' if 'experts' in key else '')
            if 'linear_fc2' in key:
                out[at + 'down_proj.weight'] = value
            else:
                out[at + 'gate_proj.weight'], out[at + 'up_proj.weight'] = value.chunk(2)
    return out


def tokens():
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % VOCABULARY


def make_whole(made, folder):
    """On one rank: writes the model as Megatron-Core loads it, and its logits."""
    state = dist_checkpointing.load(made.sharded_state_dict(), str(folder / 'dist'))
    made.load_state_dict(state)
    made.eval()
    ahead = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = made(tokens(), torch.arange(LENGTH).repeat(2, 1), ahead)
    (folder / 'model').mkdir()
    (folder / 'model' / 'config.json').write_text(json.dumps(hf_config(folder.name), indent=1) + '\n')
    whole = {name: value.contiguous() for name, value in huggingface(made.state_dict()).items()}
    save_file(whole, folder / 'model' / 'model.safetensors', metadata={'format': 'pt'})
    torch.save(logits, folder / 'logits.pt')


def in_rank(rank, work, sizes, count, folder, meeting):
    sys.stdout = open(os.devnull, 'w')
    dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=rank, world_size=count)
    arguments = (rank,) if work is save else ()
    work(*arguments, model(folder.name, *sizes), folder)
    dist.destroy_process_group()


def on_ranks(work, sizes, folder):
    count = sizes[0] * sizes[1] * sizes[2]
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(in_rank, (work, sizes, count, folder, meeting + '/file'), count)


def check(program, folder):
    logits = torch.load(folder / 'logits.pt')
    wanted = load_file(folder / 'model' / 'model.safetensors')
    for source in ('ranks', 'dist'):
        out = folder / f'from_{source}'
        subprocess.run([program, 'export', folder / source, '--plan', 'megatron', '--base-model', folder / 'model', '--out',
                        out], check=True, stdout=subprocess.DEVNULL)
        exported = load_file(out / 'model.safetensors')
        assert exported.keys() == wanted.keys(), sorted(exported.keys() ^ wanted.keys())
        for name, value in wanted.items():
            assert torch.equal(exported[name], value), name
        loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, attn_implementation='eager')
        assert not any(info.values()), info
        with torch.no_grad():
            difference = (loaded.eval()(tokens()).logits - logits).abs().max().item()
        assert difference < 1e-5, difference
        print(f'{folder.name}, {source}: {len(wanted)} tensors are the same, logits differ by {difference:.1e} at most')
        shutil.rmtree(out)


def main():
    program = sys.argv[1]
    os.environ['OMP_NUM_THREADS'] = '1'
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else temporary).absolute()
        for name, sizes in CASES.items():
            on_ranks(save, sizes, place / name)
            on_ranks(make_whole, (1, 1, 1), place / name)
            check(program, place / name)
            (place / name / 'logits.pt').unlink()


if __name__ == '__main__':
    main()
