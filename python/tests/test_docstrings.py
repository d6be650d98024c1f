# SPDX-License-Identifier: Apache-2.0
import inspect

import muster
import muster.modelopt

ROOTS = [
    *[getattr(muster, name) for name in dir(muster) if not name.startswith("_")],
    *[muster._core.SendWork, muster._core.ReceiveWork, muster._core.ReceiveConfigWork],
    *[value for name, value in vars(muster.modelopt).items() if not name.startswith("_") and getattr(value, "__module__", "") == "muster.modelopt"],
]
OF_THE_EXTENSION = ("nb_method", "property", "getset_descriptor")
# Members whose names explain them.
PLAIN = {"rank", "size", "kind", "backend", "dtype", "shape", "ndim", "name"}


def members(root):
    """Yields a class, then its methods and properties, with their names."""
    yield root.__name__, root
    if inspect.isclass(root):
        for name, value in vars(root).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, (property, staticmethod, classmethod)) or type(value).__name__ in OF_THE_EXTENSION):
                yield f"{root.__name__}.{name}", value


def has_words(name, value):
    """Returns whether there is text besides the signature with which nanobind begins a docstring."""
    words = [line for line in (value.__doc__ or "").splitlines() if line.strip() and not line.startswith(name.split(".")[-1] + "(")]
    return bool(words)


def test_every_public_name_has_a_docstring():
    roots = [root for root in ROOTS if callable(root)]
    assert len(roots) > 50
    found = [pair for root in roots for pair in members(root)]
    assert [name for name, value in found if name.split(".")[-1] not in PLAIN and not has_words(name, value)] == []
