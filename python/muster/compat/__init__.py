# SPDX-License-Identifier: Apache-2.0
"""Modules with the names, parameters and defaults of other systems.

- muster.compat.torchgfn: gfn.utils.distributed of torchgfn
- muster.compat.ml: ml.utils.torch_distributed of ml-starter
- muster.compat.vllm: GroupCoordinator in vllm.distributed.parallel_state of vLLM
- muster.compat.sglang: pull() in sglang.srt.weight_sync.local_checkpoint of SGLang
- muster.compat.torch_distributed: torch.distributed of PyTorch 0.3 and 0.4
- muster.modelopt: modelopt.torch.export.distribute of ModelOpt

Import a module in place of the original, or call `install()`. `python -m muster.compat SCRIPT` does so for a script.
docs/reference/compat.md lists all names and the deviations.
"""

from __future__ import annotations

import importlib
import os

from .. import _hook
from ..errors import InvalidArgumentError

__all__ = ["install"]

_MODULES = {
    "gfn.utils.distributed": "muster.compat.torchgfn",
    "ml.utils.torch_distributed": "muster.compat.ml",
    "modelopt.torch.export.distribute": "muster.modelopt",
    "modelopt.torch.export.trtllm.distribute": "muster.modelopt",
    "sglang.srt.weight_sync.local_checkpoint": "muster.compat.sglang",
    "vllm.distributed.parallel_state": "muster.compat.vllm",
}


def install(module: str | None = None) -> None:
    """Replaces the original modules, whether they are loaded already or imported later. Local.

    If the project of a module is installed, only the names that the module of this package has are replaced in it.
    Otherwise the module is created when the program imports it, with empty parent packages.

    "torch.distributed" is replaced only if it is named, because PyTorch itself uses it. The call imports PyTorch, and
    then sets the names of PyTorch 0.4 in that module. Other modules of PyTorch keep their references.

    Args:
        module: The name of the original module, such as "gfn.utils.distributed". None: all except torch.distributed.

    Raises:
        InvalidArgumentError: The module is unknown.
        ImportError: The module is "torch.distributed", and PyTorch is not installed.
    """
    if module == "torch.distributed":
        original, ours = importlib.import_module(module), importlib.import_module("muster.compat.torch_distributed")
        for name in ours.__all__:
            setattr(original, name, getattr(ours, name))
    elif module is None:
        _hook.install_when_imported(_MODULES, create=True)
    elif module in _MODULES:
        _hook.install_when_imported({module: _MODULES[module]}, create=True)
    else:
        known = ", ".join([*_MODULES, "torch.distributed"])
        raise InvalidArgumentError(f"muster.compat.install: unknown module {module!r} (expected one of {known})")


def _install_from_environment() -> None:
    """Installs the modules that MUSTER_COMPAT names, separated by commas. 1: all except torch.distributed. Local."""
    for name in os.environ.get("MUSTER_COMPAT", "").split(","):
        if name:
            install(None if name == "1" else name)
