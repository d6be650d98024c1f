# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML pages, for files and for notebooks."""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
import re
import typing

from . import _core
from ._files import _Path, _Progress, _source_options
from ._names import checks_names


class Report:
    """An HTML page about models, workspaces, traces or a diff, as report() makes it.

    A notebook shows it as the result of a cell.
    """

    def __init__(self, page: str) -> None:
        self._page = page

    @property
    def html(self) -> str:
        """The text of the page. It needs no other file and no network access."""
        return self._page

    @functools.cached_property
    def data(self) -> dict[str, typing.Any]:
        """The data of the page (docs/reference/report-file.md)."""
        found = re.search(r'<script type="application/json" id="muster-data">(.*?)</script>', self._page, re.DOTALL)
        assert found is not None
        data: dict[str, typing.Any] = json.loads(found[1])
        return data

    def save(self, path: _Path, *, force: bool = False) -> None:
        """Writes the page to a file.

        Raises:
            FileExistsError: The file exists, and `force` is False.
        """
        if not force:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self._page)
            return
        # The previous file remains until the new one is complete.
        partial = f"{os.fspath(path)}.partial-{os.getpid()}"
        try:
            with open(partial, "x", encoding="utf-8") as file:
                file.write(self._page)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    def _repr_html_(self) -> str:
        # The frame keeps the styles of the page and of the notebook apart. It may run scripts, but has no access to
        # the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self._page)}" sandbox="allow-scripts" title="Report of Muster" '
            'style="width: 100%; height: 45rem; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        kinds = ", ".join(section["section"] for section in self.data["sections"])
        return f"<muster.Report of {kinds}, {len(self._page)} characters>"


@checks_names
def report(
    *paths: _Path,
    diff: bool = False,
    values: bool = True,
    checksums: bool = False,
    bins: int = 24,
    layout: str | int | None = None,
    plan: _Path = "",
    base_model: _Path = "",
    source_layout: str | int | None = None,
    select: str = "",
    exclude: str = "",
    key: str = "",
    file_pattern: str = "",
    rank: int | None = None,
    step: int | None = None,
    job_id: str = "",
    progress: _Progress = None,
) -> Report:
    """Makes an HTML page about models, workspaces, directories of traces or of versions, or a diff. Local.

    Args:
        paths: The directories and files. Each becomes a section of the page, and a workspace two.
        diff: Compares the two paths in one section.
        values: False: reads only headers, so the page has no statistics.
        checksums: Also checks the recorded checksums. This reads all values a second time.
        bins: The number of bins of each histogram.
        layout: Also shows the part of each tensor that shard_model() would write for each rank of this layout.
        plan: As for show().
        base_model: As for show().
        source_layout: As for export_model().
        select: As for show().
        exclude: As for show().
        key: As for show().
        file_pattern: As for show().
        rank: As for show().
        step: As for show().
        job_id: As for show().
        progress: As for verify().

    Raises:
        InvalidArgumentError: An option does not apply to one of the paths, or `diff` is set without two paths.
        NotFoundError: A path, or the requested rank, step or job, does not exist.
        CorruptError: A file contradicts its format.
        VersionError: A newer Muster wrote it.
        IoError: Reading failed.
    """
    options = _source_options(plan, base_model, select, exclude, key, file_pattern, rank, step, job_id)
    options |= {
        "diff": diff,
        "values": values,
        "checksums": checksums,
        "bins": bins,
        "layout": layout,
        "source_layout": source_layout,
    }
    return Report(_core.report([os.fspath(path) for path in paths], options, progress))
