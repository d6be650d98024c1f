# SPDX-License-Identifier: Apache-2.0
"""Muster gathers the tensor shards and layer configs of all ranks of a job on one rank.

docs/reference/python-api.md lists the names by task. Importing this package imports neither torch nor numpy.
"""

import os as _os
import typing as _types

try:
    from ._core import ExportWork, Group, MessageQueue, ProcessGroup, SharedArena, Tensor, TraceSpan, is_tracing, make_queue_handle, version as __version__
except ImportError as _error:
    from ._platform import explained as _explained

    raise _explained(_error) from None
from . import merge
from ._exports import export_model, plan_export
from ._files import (
    NFSWorkspace,
    State,
    Workspace,
    diff,
    fingerprint,
    join,
    load_safetensors,
    load_shard,
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
    GatheredConfigs,
    GatheredTensors,
    GatherResult,
    as_tensor,
    empty,
    get_configs_async,
    get_configs_parallel,
    get_tensors_async,
    get_tensors_parallel,
    merge_tensor_async,
    merge_tensor_parallel,
    trim,
)
from ._groups import file_group, from_process_group, local_group, set_world, single_group, tcp_group, world
from ._launch import launch
from ._logs import use_logging
from ._names import missing_attribute as _missing_attribute
from ._parts import Part
from ._reports import Report, report
from ._streams import LayerPart, gather_each, gather_each_async
from ._typing import ReduceOp
from ._versions import LocalVersion, Publisher, PublishReport, PullReport, VersionInfo, VersionLog, publish, pull, versions
from .errors import (
    CancelledError,
    CorruptError,
    Error,
    InvalidArgumentError,
    IoError,
    NotFoundError,
    OutOfSpaceError,
    PeerLostError,
    RankMismatchError,
    TimeoutError,
    UnsupportedError,
    VersionError,
)

# `from muster import *` does not replace the built-in TimeoutError: write muster.TimeoutError.
__all__ = [
    "CancelledError",
    "CorruptError",
    "Error",
    "ExportWork",
    "GatherResult",
    "GatheredConfigs",
    "GatheredTensors",
    "Group",
    "InvalidArgumentError",
    "IoError",
    "LayerPart",
    "LocalVersion",
    "MessageQueue",
    "NFSWorkspace",
    "NotFoundError",
    "OutOfSpaceError",
    "Part",
    "PeerLostError",
    "ProcessGroup",
    "PublishReport",
    "Publisher",
    "PullReport",
    "RankMismatchError",
    "ReduceOp",
    "Report",
    "SharedArena",
    "State",
    "Tensor",
    "TraceSpan",
    "UnsupportedError",
    "VersionError",
    "VersionInfo",
    "VersionLog",
    "Workspace",
    "as_tensor",
    "diff",
    "empty",
    "export_model",
    "file_group",
    "fingerprint",
    "from_process_group",
    "gather_each",
    "gather_each_async",
    "get_configs_async",
    "get_configs_parallel",
    "get_tensors_async",
    "get_tensors_parallel",
    "is_tracing",
    "join",
    "launch",
    "load_safetensors",
    "load_shard",
    "local_group",
    "make_queue_handle",
    "merge",
    "merge_tensor_async",
    "merge_tensor_parallel",
    "plan_export",
    "publish",
    "pull",
    "read_state_file",
    "report",
    "safetensors_metadata",
    "save_safetensors",
    "set_world",
    "shard_model",
    "show",
    "single_group",
    "split",
    "tcp_group",
    "trim",
    "use_logging",
    "verify",
    "versions",
    "world",
    "write_state_file",
]


if _types.TYPE_CHECKING:
    from ._futures import Future as Future
else:  # type checkers would accept any name

    def __getattr__(name):
        if name == "Future":
            # With its imports it would take longer to load than the rest of the package.
            from ._futures import Future

            return Future
        raise _missing_attribute(name)


if _os.environ.get("MUSTER_MODELOPT") == "1":
    from .modelopt import install_when_imported as _install

    _install()
if _os.environ.get("MUSTER_COMPAT"):
    from .compat import _install_from_environment as _install_compat

    _install_compat()
