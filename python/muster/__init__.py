# SPDX-License-Identifier: Apache-2.0
"""Muster: gathers the tensor shards and layer configs of all ranks of a job on one rank.

The manual is docs/reference/python-api.md. Importing this package imports neither torch nor numpy.
"""

import os as _os

from ._core import Group, MessageQueue, ProcessGroup, SharedArena, Tensor, TraceSpan, is_tracing, queue_handle, version as __version__
from ._files import (
    NFSWorkspace,
    State,
    diff,
    export_model,
    join,
    load_safetensors,
    load_shard,
    plan_export,
    read_state_file,
    safetensors_metadata,
    save_safetensors,
    shard_model,
    show,
    split,
    verify,
    write_state_file,
)
from ._gathers import (
    Gathered,
    GatheredConfigs,
    GatheredTensors,
    as_tensor,
    concat,
    empty,
    first,
    get_configs_parallel,
    get_tensors_parallel,
    max,
    merge_tensor_parallel,
    same,
    stack,
    sum,
    trim,
)
from ._groups import file_group, from_process_group, local_group, set_world, single_group, tcp_group, world
from ._launch import launch
from ._streams import LayerPart, gather_each
from .errors import (
    ArgumentError,
    CancelledError,
    CorruptError,
    Error,
    IoError,
    NoSpaceError,
    NotFoundError,
    PeerLostError,
    RankMismatchError,
    TimeoutError,
    UnsupportedError,
    VersionError,
)

# `from muster import *` does not replace built-in names: write muster.max, muster.sum and muster.TimeoutError.
__all__ = [
    "ArgumentError",
    "CancelledError",
    "CorruptError",
    "Error",
    "Gathered",
    "GatheredConfigs",
    "GatheredTensors",
    "Group",
    "IoError",
    "LayerPart",
    "MessageQueue",
    "NFSWorkspace",
    "NoSpaceError",
    "NotFoundError",
    "PeerLostError",
    "ProcessGroup",
    "RankMismatchError",
    "SharedArena",
    "State",
    "Tensor",
    "TraceSpan",
    "UnsupportedError",
    "VersionError",
    "as_tensor",
    "concat",
    "diff",
    "empty",
    "export_model",
    "file_group",
    "first",
    "from_process_group",
    "gather_each",
    "get_configs_parallel",
    "get_tensors_parallel",
    "is_tracing",
    "join",
    "launch",
    "load_safetensors",
    "load_shard",
    "local_group",
    "merge_tensor_parallel",
    "plan_export",
    "queue_handle",
    "read_state_file",
    "safetensors_metadata",
    "same",
    "save_safetensors",
    "set_world",
    "shard_model",
    "show",
    "single_group",
    "split",
    "stack",
    "tcp_group",
    "trim",
    "verify",
    "world",
    "write_state_file",
]

if _os.environ.get("MUSTER_MODELOPT") == "1":
    from .modelopt import install_when_imported as _install

    _install()
