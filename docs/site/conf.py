# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the documentation site. ./tools/docs runs Sphinx on the tree that stage.py prepares."""

import os
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

sys.path.insert(0, os.path.dirname(__file__))
import python_package

ROOT = Path(os.environ["MUSTER_DOCS_ROOT"])

project = "Muster"
release = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[1]
copyright = "the authors of Muster, Apache-2.0"
extensions = ["breathe", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False

# Quotation marks stay as they are written.
smartquotes = False
# An anchor of a heading is its text, as on Git hosts.
myst_heading_anchors = 6

breathe_default_project = "muster"
breathe_show_include = False
cpp_index_common_prefix = ["muster::"]
# Each page of a header opens the namespaces again. The compiler refuses real duplicates.
# Sphinx also looks for builtin types such as "bytes" among the attributes of classes, and may find several.
suppress_warnings = ["duplicate_declaration.cpp", "ref.python"]
# Docstrings mark code as Markdown does.
default_role = "literal"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = python_package.MOCKED

# The side bar: the folders of docs/ in this order. A page of another folder is in no table of contents, which is an
# error.
SECTIONS = {
    "Start": [""],
    "Tutorials": ["tutorials"],
    "How-to guides": ["howto"],
    "Reference": ["reference"],
    "Explanation": ["explanation"],
    "Contributing": ["contributing", "img"],
}
# The generated pages below the entry pages of the two interfaces. The headers of other systems' interfaces come last.
API = {
    "reference/cpp-api": ["/api/cpp/*", "/api/cpp/compat/*"],
    "reference/python-api": ["/api/python/*"],
}


def toctree(docs, caption, patterns):
    """Returns a hidden table of contents of the pages that the patterns find; it is empty if they find none."""
    found = [pattern for pattern in patterns if any(any(docs.glob(pattern[1:] + suffix)) for suffix in source_suffix)]
    options = [":hidden:", ":glob:", f":caption: {caption}"] if caption else [":hidden:", ":glob:"]
    return "\n".join(["\n", "```{toctree}", *options, "", *found, "```", ""]) if found else ""


def add_contents(app, docname, source):
    """Adds tables of contents to the start page, to the indices of folders and to the entry pages of the interfaces."""
    docs = Path(app.srcdir)
    if docname == root_doc:
        for caption, folders in SECTIONS.items():
            # The installation comes first. The README of a folder inside of a section lists the pages of that folder.
            names = ["install", "*"] if caption == "Start" else ["*", "*/README"]
            patterns = [f"/{folder}/{name}".replace("//", "/") for folder in folders for name in names]
            source[0] += toctree(docs, caption, patterns)
    elif docname.endswith("/README") and docname.count("/") > 1:
        source[0] += toctree(docs, "", [f"/{docname.removesuffix('README')}*"])
    elif docname in API:
        source[0] += toctree(docs, "", API[docname])


def link_to_header(env, header, children):
    """Returns a link to the page of a header, a path below include/muster."""
    return addnodes.pending_xref(
        "", *children, refdomain="doc", reftarget=f"api/cpp/{header.with_suffix('')}", reftargetid=None,
        refdoc=env.docname, reftype="myst", refexplicit=True,
    )


class OutsideLinks(SphinxTransform):
    """Changes links out of docs/: to the page of a header, to a copy of another file, to the bare text for a folder."""

    default_priority = 5

    def apply(self, **kwargs):
        page = Path(self.env.doc2path(self.env.docname))
        docs = Path(self.env.srcdir)
        kinds = (addnodes.pending_xref, addnodes.download_reference)
        for link in list(self.document.findall(lambda node: isinstance(node, kinds) and node.get("reftype") == "myst")):
            target = link["reftarget"].split("#")[0]
            # Sphinx makes a page's name of any file whose suffix is that of a page.
            if link.get("refdomain") == "doc":
                paths = [docs / f"{target}{suffix}" for suffix in source_suffix]
            else:
                paths = [page.parent / target]
            path = next((Path(os.path.normpath(path)) for path in paths if path.exists()), docs)
            if not target or path.is_relative_to(docs):
                continue
            name = path.relative_to(docs.parent if path.is_relative_to(docs.parent) else ROOT)
            if path.is_dir():
                link.replace_self(link.children)
            elif name.is_relative_to("include/muster") and name.suffix == ".hpp":
                link.replace_self(link_to_header(self.env, name.relative_to("include/muster"), link.children))
            else:
                target = os.path.relpath(docs.parent / name, page.parent)
                options = {"refdoc": self.env.docname, "reftype": "myst", "refexplicit": True}
                link.replace_self(addnodes.download_reference("", "", *link.children, reftarget=target, **options))


class HeaderNames(SphinxTransform):
    """The name of a header in code font becomes a link to its page."""

    default_priority = 6

    def apply(self, **kwargs):
        for name in list(self.document.findall(nodes.literal)):
            header = re.fullmatch(r"(?:include/)?muster/([\w/]+\.hpp)", name.astext())
            linked = isinstance(name.parent, (nodes.reference, addnodes.pending_xref, addnodes.download_reference))
            if header and not linked and (ROOT / "include/muster" / header[1]).exists():
                name.replace_self(link_to_header(self.env, Path(header[1]), [name.deepcopy()]))


def add_index(app, exception):
    """Copies the start page to the name that web servers look for."""
    if exception is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def configure(app, config):
    config.breathe_projects = {"muster": str(Path(app.srcdir).parent / "xml")}
    python_package.load(ROOT / "python", os.environ.get("MUSTER_DOCS_STUB"))


def setup(app):
    app.connect("config-inited", configure)
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
    app.add_transform(OutsideLinks)
    app.add_transform(HeaderNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
