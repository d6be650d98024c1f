# SPDX-License-Identifier: Apache-2.0
"""Imports the package muster without its compiled extension."""

import __future__
import importlib
import inspect
import pkgutil
import sys
import types

# Modules that need not be installed.
MOCKED = ["torch", "numpy", "modelopt"]


class Missing:
    """Base class of the names of the extension module that no stub describes."""


class MissingCore(types.ModuleType):
    """Replaces the extension module if there is no stub: each name is a separate class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Missing,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


def load(folder, stub=None):
    """Imports muster from a folder. `stub`: the _core.pyi of a build, which is run in place of the extension module."""
    if "muster" in sys.modules:
        return
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    if stub:
        core = types.ModuleType("muster._core")
        core.__file__ = str(stub)
        with open(stub) as file:
            code = compile(file.read(), stub, "exec", flags=__future__.annotations.compiler_flag)
        # The stub imports muster._typing, and so the package, which then finds the names of the extension missing.
        package = types.ModuleType("muster")
        package.__path__ = [str(folder / "muster")]
        sys.modules["muster"] = package
        exec(code, core.__dict__)
        del sys.modules["muster"]
    else:
        core = MissingCore("muster._core")
    sys.modules["muster._core"] = core
    importlib.import_module("muster")


def public_modules():
    """Yields the modules of the package whose names have no underscore, with their public names."""
    package = sys.modules["muster"]
    seen = set()
    submodules = [module.name for module in pkgutil.walk_packages(package.__path__, "muster.")]
    for name in ["muster", *(module for module in submodules if "._" not in module)]:
        module = importlib.import_module(name)
        public = []
        for attribute, value in sorted(vars(module).items()):
            of_module = getattr(value, "__module__", name) or name
            if attribute.startswith("_") or inspect.ismodule(value) or not of_module.startswith("muster"):
                continue
            if inspect.isroutine(value) or inspect.isclass(value):
                # Names that the package exports belong to its page.
                if value in seen:
                    continue
                seen.add(value)
            elif type(value).__module__ == "__future__":
                continue
            public.append((attribute, value))
        if public:
            yield module, public
