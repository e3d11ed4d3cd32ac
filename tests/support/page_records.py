# SPDX-License-Identifier: Apache-2.0
"""Records of telemetry and a comparison, for tests of the pages that show them."""

import json

from q2compile.telemetry.folder import COLUMNS

NONFINITE = {"event": "nonfinite", "step": 3, "module": "up", "gemm": "dgrad", "operand": "dy"}


def record(step, module="up", error=0.1, **others):
    row = dict.fromkeys(COLUMNS, 0.0)
    row |= {"step": step, "module": module, "gemm": "fprop", "operand": "x", "format": "nvfp4"}
    return {**row, "relative_error": error, "changed": None, **others}


def written(folder, *lines, rank=0):
    """A folder of telemetry with these lines."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"rank{rank}.jsonl").write_text(text)
    return folder


def compared(folder, **modules):
    """A folder with a comparison: module -> (share, FLOPs, error of fprop)."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"module": name, "share": share, "flops": flops, "fprop": error}
        for name, (share, flops, error) in modules.items()
    ]
    rows = [{**row, "dgrad": None, "wgrad": None} for row in rows]
    (folder / "compare.json").write_text(json.dumps({"recipe": "quartet2", "modules": rows}))
    return folder
