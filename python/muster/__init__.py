# SPDX-License-Identifier: Apache-2.0
"""Muster: tensor shards and layer configs of all ranks, gathered to the first.

The manual is docs/python.md. Importing this package imports neither torch nor numpy.
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

if _os.environ.get("MUSTER_MODELOPT") == "1":
    from .modelopt import install_when_imported as _install

    _install()
