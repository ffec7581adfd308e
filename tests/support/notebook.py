"""Execute a notebook with a real kernel, as ``python -m tests.support.notebook CELLS OUTPUTS [MARKER]``.

CELLS is a JSON list of the cells' texts. OUTPUTS gets the list of what each has printed, with the error that
ended it. When the file MARKER appears, the kernel is interrupted as by the stop button.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import nbclient
import nbformat.v4

from tests.support.processes import wait_for


def main() -> None:
    """Execute the cells."""
    cells, outputs, *marker = map(Path, sys.argv[1:])
    texts = json.loads(cells.read_text())
    version: Any = nbformat.v4  # it has no types
    notebook = version.new_notebook(cells=[version.new_code_cell(text) for text in texts])
    client = nbclient.NotebookClient(notebook, timeout=240, allow_errors=True)
    if marker:
        threading.Thread(target=interrupt, args=(client, marker[0]), daemon=True).start()
    client.execute()
    outputs.write_text(json.dumps([read_output(cell) for cell in notebook.cells]))


def interrupt(client: nbclient.NotebookClient, marker: Path) -> None:
    """Interrupt the kernel once the file exists."""
    wait_for(marker.exists, f"{marker}", 200.0)
    manager: Any = client.km  # there is one since the kernel runs
    asyncio.run(manager.interrupt_kernel())


def read_output(cell: Any) -> str:
    """Return what a person sees below the cell."""
    texts = [
        f"{out.ename}: {out.evalue}" if out.output_type == "error" else out.get("text", "")
        for out in cell.outputs
    ]
    return "".join(texts)


if __name__ == "__main__":
    main()
