# SPDX-License-Identifier: Apache-2.0
import html
import re

import numpy as np
import pytest

import muster


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    muster.save_safetensors(path, {"layers.0.w": np.arange(6, dtype="f4").reshape(2, 3), "layers.1.</script>": np.zeros(4)})
    return path


def test_data(model):
    report = muster.report(model)
    (section,) = report.data["sections"]
    assert section["section"] == "model" and section["kind"] == "safetensors"
    rows = section["rows"]
    assert dict(zip(rows["name"], rows["maximum"])) == {"layers.0.w": 5.0, "layers.1.</script>": 0.0}
    assert dict(zip(rows["name"], rows["histogram"]))["layers.1.</script>"] == [4]
    assert repr(report).startswith("<muster.Report of model,")
    (section,) = muster.report(model, values=False, select="*.w").data["sections"]
    assert section["tensors"] == 1 and "maximum" not in section["rows"]


def test_several_paths_and_diffs(model, tmp_path):
    state = tmp_path / "state.h5"
    muster.write_state_file(state, {"a": 1}, {"layers.0.w": np.ones((2, 3), "f4")})
    assert [section["kind"] for section in muster.report(model, state).data["sections"]] == ["safetensors", "state"]
    (section,) = muster.report(model, state, diff=True).data["sections"]
    kinds = dict(zip(section["rows"]["name"], section["rows"]["kind"]))
    assert section["section"] == "diff" and kinds == {"layers.0.w": "values", "layers.1.</script>": "only in A"}


def test_notebooks(model):
    report = muster.report(model)
    frame = report._repr_html_()
    assert re.match(r'<iframe srcdoc="[^"]*" sandbox="allow-scripts" ', frame)
    assert html.unescape(re.match(r'<iframe srcdoc="([^"]*)"', frame)[1]) == report.html


def test_save(model, tmp_path):
    report, path = muster.report(model), tmp_path / "report.html"
    report.save(path)
    assert path.read_text(encoding="utf-8") == report.html
    with pytest.raises(FileExistsError):
        report.save(path)
    report.save(path, force=True)


def test_refusals(model, tmp_path):
    with pytest.raises(muster.InvalidArgumentError, match="two paths"):
        muster.report(model, diff=True)
    with pytest.raises(muster.InvalidArgumentError, match="no path"):
        muster.report()
    with pytest.raises(muster.InvalidArgumentError, match="bins"):
        muster.report(model, bins=0)
    with pytest.raises(muster.NotFoundError, match="does not exist"):
        muster.report(tmp_path / "none")


def test_progress_ends_a_report(model):
    class Enough(Exception):
        pass

    def tell(*_):
        raise Enough

    with pytest.raises(Enough):
        muster.report(model, progress=tell)
