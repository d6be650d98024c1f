# SPDX-License-Identifier: Apache-2.0
"""The names and signatures of the reference systems, compared with those of the package.

Each file of reference_signatures/ has the names of one module, in the order of its documentation. `vllm.txt` is
compared with muster.compat.vllm, and `modelopt.txt` with muster.modelopt. A line is one of these:

    name(a, b=1, *, c)   a function or a class: the names, the order, the kinds and the defaults of its parameters,
                         without `self` and `cls`. A default is an expression over the names of the module.
    name = value         an attribute, or the default of a field
    name                 an attribute, a property, or a class of unknown parameters
    +name                a name that Muster adds
    line ~ (a, b=1)      the signature of Muster, if it differs from the recorded one
    # words              a comment

A name may be qualified by its class: `Class.method(a)`. Annotations are not compared.
"""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).with_name("reference_signatures")
FILES = sorted(FOLDER.glob("*.txt"), key=lambda path: path.name)


def module_of(path):
    if path.stem in ("torch_distributed", "vllm"):
        pytest.importorskip("torch")
    return importlib.import_module("muster.modelopt" if path.stem == "modelopt" else f"muster.compat.{path.stem}")


def lines_of(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def name_of(line):
    return re.match(r"\+?([\w.]+)", line)[1]


def parameters_of(text, module):
    """Returns (name, kind, default) of each parameter of a recorded signature."""
    scope = dict(vars(module))
    exec(f"def recorded{text}: pass", scope)
    return [(each.name, each.kind, each.default) for each in inspect.signature(scope["recorded"]).parameters.values()]


def found(module, name):
    """Returns (owner, last name, value); the value is None for a field without a default. Raises AttributeError."""
    *path, last = name.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    if inspect.isclass(owner) and not hasattr(owner, last) and any(last in vars(base).get("__annotations__", {}) for base in owner.__mro__):
        return owner, last, None
    return owner, last, getattr(owner, last)


def difference(module, line):
    """Returns the difference between a recorded line and the package, or None."""
    name = name_of(line)
    try:
        owner, last, value = found(module, name)
    except AttributeError:
        return f"{name} is missing"
    rest = line.removeprefix("+")[len(name) :].rpartition("~")[2].strip()
    if rest.startswith("="):
        wanted = ast.literal_eval(rest[1:].strip())
        return None if type(value) is type(wanted) and value == wanted else f"{line}: it is {value!r}"
    if not rest:
        return None
    if not callable(value):
        return f"{line}: it is not callable"
    parameters = list(inspect.signature(value).parameters.values())
    # A class method and the signature of a class are already bound.
    if inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, last)):
        parameters = parameters[1:]
    own = [(each.name, each.kind, each.default) for each in parameters]
    return None if own == parameters_of(rest, module) else f"{line}: it is {inspect.signature(value)}"


def public_names(module):
    """Yields the names of __all__, and the public members of the classes among them."""
    for name in module.__all__:
        yield name
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (f"{name}.{each}" for each in [*vars(value), *vars(value).get("__annotations__", {})] if not each.startswith("_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_names_have_the_recorded_signatures(path):
    module = module_of(path)
    assert [each for each in (difference(module, line) for line in lines_of(path)) if each] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_other_name_is_public(path):
    assert sorted(set(public_names(module_of(path))) - {name_of(line) for line in lines_of(path)}) == []


def test_each_name_is_recorded_once():
    for path in FILES:
        names = [name_of(line) for line in lines_of(path)]
        assert len(names) == len(set(names)), path


class Sample:
    """A module, for the tests of this file."""

    number = 3

    class Kind:
        field: int
        other = "x"

        def method(self, a, b=3):
            pass

        @classmethod
        def make(cls, *rest):
            pass


@pytest.mark.parametrize(
    "line, words",
    [
        ("Kind", None),
        ("Kind.field", None),
        ("Kind.other = 'x'", None),
        ("Kind.method(a, b=number)", None),
        ("Kind.make(*rest)", None),
        ("Kind.absent", "is missing"),
        ("absent(a)", "is missing"),
        ("Kind.other = 'y'", "it is 'x'"),
        ("number = 3.0", "it is 3"),
        ("number()", "not callable"),
        ("Kind.method(b, a=number)", "it is (self, a, b=3)"),
        ("Kind.method(a, b=4)", "it is (self, a, b=3)"),
        ("Kind.method(a, *, b=number)", "it is (self, a, b=3)"),
        ("Kind.make(rest)", "it is (*rest)"),
        ("Kind.make(rest) ~ (*rest)", None),
    ],
)
def test_differences_are_found(line, words):
    told = difference(Sample, line)
    assert told is None if words is None else words in told
