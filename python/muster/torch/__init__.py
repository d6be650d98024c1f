# SPDX-License-Identifier: Apache-2.0
"""Backends of torch.distributed for tensors on the CPU: init_process_group("muster"), and "cpu:muster_cpu,cuda:nccl".

PyTorch 2.14 or later finds the backends by their entry point. Call register() if the package is not installed.
"""

from __future__ import annotations

import torch
import torch.distributed as distributed

__all__ = ["register"]

_LEAST = (2, 14)


def register() -> None:
    """Registers the backends "muster" and "muster_cpu" with torch.distributed. Later calls do nothing.

    Raises:
        ImportError: PyTorch is older than 2.14.
    """
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    if version < _LEAST:
        raise ImportError(f"muster.torch needs PyTorch 2.14 or later, and this is {torch.__version__}: upgrade torch, or use gloo")
    from . import _backends

    if "MUSTER" not in distributed.Backend._plugins:
        for name, make in (("muster", _backends.make_group), ("muster_cpu", _backends.make_backend)):
            distributed.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
