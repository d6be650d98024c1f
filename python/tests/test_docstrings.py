# SPDX-License-Identifier: Apache-2.0
import importlib
import importlib.util
import inspect
import re

import pytest

import muster
import muster.compat
import muster.compat.ml
import muster.compat.sglang
import muster.compat.torchgfn
import muster.merge
import muster.modelopt

MODULES = [muster, muster.errors, muster.merge, muster.modelopt, muster.compat, muster.compat.ml, muster.compat.sglang, muster.compat.torchgfn]
if importlib.util.find_spec("torch"):
    MODULES += [importlib.import_module(f"muster.compat.{name}") for name in ("torch_distributed", "vllm")]
ROOTS = [
    *[getattr(muster, name) for name in dir(muster) if not name.startswith("_")],
    *[muster._core.OpenPublisher, muster._core.SendWork, muster._core.ReceiveWork, muster._core.ReceiveConfigWork],
    *[value for module in MODULES[1:] for name, value in vars(module).items() if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__],
]
OF_THE_EXTENSION = ("nb_method", "property", "getset_descriptor")
# Names that differ from the former ones, with calls that use the former ones.
FORMER = [
    (lambda: muster.shard_model("m", "o", 2, carry="none"), "'carry' was renamed: use 'extra_files'"),
    (lambda: muster.shard_model("m", "o", layout=2), "'layout' was renamed: use 'source_layout' or 'target_layout'"),
    (lambda: muster.load_shard("m", 2, 0, "auto", at="model"), "'at' was renamed: use 'key'"),
    (lambda: muster.verify("p", layout=2), "'layout' was renamed: use 'source_layout'"),
    (lambda: muster.export_model("s", "o", to=2), "'to' was renamed: use 'target_layout'"),
    (lambda: muster.export_model("s", "o", shards="part{rank}.pt"), "'shards' was renamed: use 'file_pattern'"),
    (lambda: muster.verify("p", base="b"), "'base' was renamed: use 'base_model'"),
    (lambda: muster.show("p", pattern="*"), "'pattern' was renamed: use 'select'"),
    (lambda: muster.Workspace("p", generations_kept=3), "'generations_kept' was renamed: use 'steps_kept'"),
    (lambda: muster.get_tensors_parallel(None, own="copy"), "'own' was renamed: use 'root_tensors'"),
    (lambda: muster.local_group("k", 0, 1, numbers=[0]), "'numbers' was renamed: use 'global_ranks'"),
]


def members(root):
    """Yields a class, then its methods and properties, with their names."""
    yield root.__name__, root
    if inspect.isclass(root):
        for name, value in vars(root).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, (property, staticmethod, classmethod)) or type(value).__name__ in OF_THE_EXTENSION):
                yield f"{root.__name__}.{name}", value


def text_of(value):
    """Returns the docstring without the signatures with which nanobind begins it: `name(self) -> int`, `(self) -> int`."""
    lines = [line.strip() for line in (value.__doc__ or "").splitlines()]
    return "\n".join(line for line in lines if not re.match(r"\w*\(.*\)( -> .+)?$", line)).strip()


def found():
    roots = [root for root in ROOTS if callable(root) and hasattr(root, "__name__")]
    assert len(roots) > 50
    return {name: value for root in roots for name, value in members(root)}


def test_a_signature_is_not_text():
    assert text_of(property(doc="(self) -> int")) == ""
    assert text_of(property(doc="(self, arg: float, /) -> None")) == ""
    assert text_of(property(doc="size(self) -> int\n\nThe number of ranks.")) == "The number of ranks."


def test_every_public_name_has_a_docstring():
    assert [module.__name__ for module in MODULES if not text_of(module)] == []
    assert [name for name, value in found().items() if not text_of(value)] == []


def test_docstrings_are_sentences():
    """The first line begins with a capital letter and ends with a full stop, and so does each item of a section."""
    bad = []
    for name, value in found().items():
        text = text_of(value)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=\w+:\n)", text)]
        bad += [f"{name}: {part}" for part in paragraphs if not part.endswith((".", ":", ").", '."'))]
        if not re.match(r"[A-Z(`{_]", text):
            bad.append(f"{name}: {text[:40]}")
    assert bad == []


@pytest.mark.parametrize("name", [name for name, value in found().items() if inspect.isfunction(value)])
def test_the_arguments_are_those_of_the_signature(name):
    """Each name in the section Args is a parameter, in the order of the signature."""
    value = found()[name]
    section = re.search(r"^ *Args:\n((?: +.*\n?)+)", inspect.cleandoc(value.__doc__ or ""), re.MULTILINE)
    listed = re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE) if section else []
    parameters = list(inspect.signature(value).parameters)
    assert listed == [each for each in parameters if each in listed], name


@pytest.mark.parametrize("call, words", FORMER)
def test_an_error_about_a_former_keyword_gives_the_present_one(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("name, present", [("ArgumentError", "InvalidArgumentError"), ("max", "merge.max"), ("queue_handle", "make_queue_handle")])
def test_an_error_about_a_former_attribute_gives_the_present_one(name, present):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use muster.{present}"):
        getattr(muster, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        muster.nothing


def test_a_star_import_hides_no_built_in_name():
    import builtins

    assert not set(muster.__all__) & set(dir(builtins))
    assert set(muster.__all__) <= set(dir(muster))
