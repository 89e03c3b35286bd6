"""The benchmark for accelerators, dry on the CPU: every section runs, and a wrong result is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


BENCH = Path(__file__).parent.parent / "bench" / "gpu.py"


def bench(folder: Path, *options: str, patch: str = "") -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed and the JSON; `patch`: a line that runs before."""
    code = f"import sys, runpy; sys.path.insert(0, {str(BENCH.parent)!r}); {patch}\n"
    code += f"runpy.run_path({str(BENCH)!r}, run_name='__main__')"
    file = folder / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-c", code, "--device", "cpu", "--quick", "--json", str(file), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text())


def test_every_section_runs_on_a_cpu(tmp_path: Path) -> None:
    code, said, found = bench(tmp_path, "--methods", "fedavg")
    assert code == 0, said
    assert said.rstrip().endswith("all right")
    assert found["faults"] == []
    sections = ("correctness", "rates", "convolutions", "profile", "speed", "methods", "space", "waiting")
    assert list(found["seconds"]) == list(sections)
    assert all(found[name] for name in sections)
    assert [row["method"] for row in found["correctness"]["rows"]] == ["fedavg"]
    assert {row["variant"] for row in found["convolutions"]["rows"]} == {"vmap", "unfold", "grouped", "loop"}


def test_a_wrong_result_is_told(tmp_path: Path) -> None:
    """Side by side in lanes, one step of the optimiser goes too far."""
    patch = (
        "import gpu_layers, fedkper.descent as d; many = d._many; "
        "d._many = lambda leaves, sgd: many(leaves, d.SGD(1.1 * sgd.lr))"
    )
    code, said, found = bench(tmp_path, "--methods", "fedavg", "--only", "correctness", patch=patch)
    assert code == 1, said
    assert "WRONG: fedavg, a step" in said
    assert any("fedavg, a step" in fault for fault in found["faults"])
