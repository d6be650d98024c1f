# SPDX-License-Identifier: Apache-2.0
"""The function of sglang.srt.weight_sync.local_checkpoint that brings the local copy of a host to a version of weights.

Its name, parameters and defaults are those of SGLang, and the format of the versions is the same.
docs/reference/compat.md lists the deviations.
"""

from __future__ import annotations

import importlib
import typing

from .. import _versions

__all__ = ["pull"]

# A network file system may show a version this many seconds after its publisher has completed it.
_WAIT = 30.0


def pull(
    local_checkpoint_dir: str,
    base_dir: str,
    source_dir: str,
    target_version: int,
    pre_read_hook: typing.Optional[str] = None,
) -> None:
    """Brings a directory of this host to a version, as muster.pull() does. Local.

    Args:
        local_checkpoint_dir: The directory to bring to the version. It is created if it does not exist.
        base_dir: The model directory that is version 0.
        source_dir: The directory of the versions.
        target_version: The version. 0: the base.
        pre_read_hook: "MODULE.FUNCTION", called with `source_dir` and `target_version` before versions are read. None,
            or a target of 0: no call.

    Raises:
        Error: As for muster.pull(). The directory is unchanged then.
    """
    if target_version > 0 and pre_read_hook:
        module, _, name = pre_read_hook.rpartition(".")
        getattr(importlib.import_module(module), name)(source_dir, target_version)
    _versions.pull(source_dir, local_checkpoint_dir, base=base_dir, version=target_version, wait=_WAIT)
