# SPDX-License-Identifier: Apache-2.0
"""Prepares the tree that Sphinx reads: copies of the pages of docs/, and generated pages of the two interfaces.

Reports public names without documentation; the exit status is then 1.
"""

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer

import python_package

# Members of classes that need no comment: their names explain them, or the language does.
PLAIN_PYTHON = {"rank", "size", "kind", "backend", "dtype", "shape", "ndim", "name"}
PLAIN_CPP = re.compile(
    r"Compound \S+< .* is not|of (?:struct|class) \S+< .* is not|"  # a specialization: its template has the comment
    r"Member (?:(\w+)\((?:const )?\1(?:<.*>)? ?&&?\w*\)|operator==?\(|(?:begin|end|size|empty)\(\))"
    r".*\((?:function|friend)\) of "
)


def copy_pages(root, docs):
    """Copies the pages, because Sphinx resolves symbolic links, and links to the other files of the tree."""
    for path in root.iterdir():
        if path.name not in ("docs", ".git") and not path.name.startswith("build"):
            (docs.parent / path.name).symlink_to(path)
    for folder, folders, files in os.walk(root / "docs"):
        folder = Path(folder)
        if folder == root / "docs":
            folders.remove("site")
        (docs / folder.relative_to(root / "docs")).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(folder / file, docs / (folder / file).relative_to(root / "docs"))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def heading(text):
    return f"{text}\n{'=' * len(text)}\n"


def cpp_pages(root, docs):
    """Runs Doxygen and writes a page per header. Returns the places without documentation."""
    include = root / "include"
    log = docs.parent / "doxygen.log"
    settings = {
        "INPUT": include / "muster",
        "OUTPUT_DIRECTORY": docs.parent,
        "STRIP_FROM_PATH": include,
        "STRIP_FROM_INC_PATH": include,
        "WARN_LOGFILE": log,
    }
    lines = [(root / "docs/site/Doxyfile").read_text(), *(f'{name} = "{value}"' for name, value in settings.items())]
    subprocess.run(["doxygen", "-"], input="\n".join(lines), text=True, check=True)
    for header in sorted(include.glob("muster/**/*.hpp")):
        name = header.relative_to(include)
        page = docs / "api/cpp" / name.relative_to("muster").with_suffix(".rst")
        title = heading(str(name.relative_to("muster")))
        write(page, f'{title}\n.. code-block:: cpp\n\n   #include "{name}"\n\n.. doxygenfile:: {header.name}\n')
    # Doxygen repeats the members of a base class for each derived class.
    return [line for line in dict.fromkeys(log.read_text().splitlines()) if line and not PLAIN_CPP.search(line)]


def constant_comment(name, value):
    """Returns the `#:` comment of a constant, from the module of the package that defines it."""
    for module_name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if module_name.split(".")[0] == "muster" and file.endswith(".py") and vars(module).get(name) is value:
            lines = ModuleAnalyzer.for_module(module_name).find_attr_docs().get(("", name))
            if lines:
                return "\n".join(lines).strip()
    return ""


def place(value):
    """Returns the file and the line of a definition, for warnings."""
    try:
        return f"{inspect.getsourcefile(value)}:{inspect.getsourcelines(value)[1]}"
    except (OSError, TypeError):
        return "python"


def undocumented_members(name, value):
    """Yields a warning for each public method or property of a class without a docstring."""
    for member, item in vars(value).items():
        function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
        if member.startswith("_") or member in PLAIN_PYTHON or not inspect.isroutine(function):
            continue
        if not inspect.getdoc(getattr(value, member)):
            yield f"{place(function)}: warning: {name}.{member} has no docstring."


def python_pages(root, docs, stub):
    """Writes a page per public module. Returns the places without documentation."""
    found = []
    with mock(python_package.MOCKED):
        python_package.load(root / "python", stub)
        for module, names in python_package.public_modules():
            text = f"{heading(module.__name__)}\n.. automodule:: {module.__name__}\n"
            missing = []
            for name, value in names:
                full = f"{module.__name__}.{name}"
                if inspect.isclass(value) and issubclass(value, python_package.Missing):
                    missing.append(full)
                elif inspect.isclass(value):
                    text += f"\n.. autoclass:: {full}\n   :members:\n   :undoc-members:\n   :show-inheritance:\n"
                    found += undocumented_members(full, value)
                elif inspect.isroutine(value):
                    text += f"\n.. autofunction:: {full}\n"
                else:
                    comment = constant_comment(name, value)
                    lines = comment.replace("\n", "\n   ")
                    text += f"\n.. py:data:: {full}\n\n   {lines}\n"
                    if not comment:
                        found.append(f"{module.__file__}: warning: {full} has no #: comment.")
                if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                    found.append(f"{place(value)}: warning: {full} has no docstring.")
            if missing:
                names = ", ".join(f"``{name}``" for name in missing)
                text += f"\n.. note::\n\n   This site was built without the extension module, which defines {names}.\n"
            write(docs / "api/python" / f"{module.__name__}.rst", text)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("stage", type=Path)
    parser.add_argument("--stub")
    arguments = parser.parse_args()
    docs = arguments.stage / "docs"
    docs.mkdir(parents=True)
    copy_pages(arguments.root, docs)
    # The pages that hold the tables of contents.
    titles = {"README": "Muster", "reference/cpp-api": "C++ API", "reference/python-api": "Python API"}
    for page, title in titles.items():
        if not (docs / f"{page}.md").exists():
            write(docs / f"{page}.md", f"# {title}\n")
    found = cpp_pages(arguments.root, docs) + python_pages(arguments.root, docs, arguments.stub)
    for line in found:
        print(line.replace(f"{arguments.root}/", ""), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
