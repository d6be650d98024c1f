# SPDX-License-Identifier: Apache-2.0
"""Replaces the modules of other projects with modules of this package, when a program imports them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import runpy
import sys

# The modules to replace, each with the module of this package that replaces it.
_replaced: dict[str, str] = {}
# Those of them that are created if their project is not installed.
_created: set[str] = set()


def install_when_imported(modules: dict[str, str], *, create: bool = False) -> None:
    """Replaces the names of modules that are loaded now, or when they are imported. Local.

    Args:
        modules: The names of modules, each with the name of the module of this package that replaces it.
        create: Whether a module that is not installed is created, with its parent packages.
    """
    _replaced.update(modules)
    if create:
        _created.update(modules)
    for name, ours in modules.items():
        if name in sys.modules:
            replace(sys.modules[name], importlib.import_module(ours))
    # The first finder replaces the names of installed modules. The last one creates modules that no other one finds.
    if _replacer not in sys.meta_path:
        sys.meta_path.insert(0, _replacer)
    if create and _creator not in sys.meta_path:
        sys.meta_path.append(_creator)


class _Replacer(importlib.abc.MetaPathFinder):
    """Finds an installed module, and replaces its names after it has been executed."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in _replaced:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module):
            run(module)
            replace(module, importlib.import_module(_replaced[fullname]))

        spec.loader.exec_module = run_and_replace
        return spec


class _Creator(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the modules of projects that are not installed, and empty packages for their parents."""

    def find_spec(self, fullname, path, target=None):
        is_parent = any(name.startswith(f"{fullname}.") for name in _created)
        root, _, rest = fullname.partition(".")
        # A package that is installed is not extended.
        if not (is_parent or fullname in _created) or (rest and getattr(sys.modules.get(root), "__loader__", None) is not self):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_parent)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__
        if name in _created:
            # The import system returns the module that it finds here.
            sys.modules[name] = importlib.import_module(_replaced[name])


_replacer = _Replacer()
_creator = _Creator()


def replace(upstream, ours) -> None:
    """Replaces the names of a module that `ours` exports, and all references to its functions and classes."""
    theirs = {}
    for name in ours.__all__:
        value, own = vars(upstream).get(name), getattr(ours, name)
        if name not in vars(upstream) or value is own:
            continue
        setattr(upstream, name, own)
        # Other values, such as texts, may be the same objects as unrelated values of other modules.
        if inspect.isfunction(value) or inspect.isclass(value):
            theirs[id(value)] = own
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in theirs:
                setattr(module, name, theirs[id(value)])


def run_script(program: str) -> None:
    """Runs the script that the command line of `program` names, with its arguments."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {program} SCRIPT [ARGUMENT ...]")
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
