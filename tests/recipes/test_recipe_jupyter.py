"""Jupyter: the cells of the page run in a kernel."""

from __future__ import annotations

import re

import pytest
from docs_kit import ROOT

pytest.importorskip("nbclient", reason="without nbclient")
pytest.importorskip("ipykernel", reason="without ipykernel")

import nbclient
import nbformat


@pytest.mark.filterwarnings("ignore")  # of Jupyter and what it is built on
def test_the_cells_of_the_page_run_in_a_kernel(service, tmp_path):
    page = (ROOT / "docs" / "howto" / "jupyter.md").read_text()
    cells = re.findall(r"^```py\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert outputs[0]["text"] == f"{len(service.inventory.surveys)} surveys\n"
    assert "certain" in outputs[1]["text"]
    assert "invited" in outputs[2]["data"]["text/plain"]
