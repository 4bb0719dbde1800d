"""On a GPU: traced peaks and calibrated times against what really happens here."""

from __future__ import annotations

import shutil

import pytest
from truth import h200_rows, h200_settings

from headway.plan.tracer.measurement import measure_module

NO_GPU = shutil.which("nvidia-smi") is None


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("index", "also"),
    [(0, (4, 16)), (2, (3, 8)), (3, (64, 128)), (4, (64, 128)), (6, (4,))],
    ids=lambda value: str(value),
)
def test_predicted_against_measured(index: int, also: tuple[int, ...]) -> None:
    """One measured batch size calibrates; the others must come out within 10 %, all peaks within 2 %."""
    found = measure_module(h200_settings(index), also=also)
    print(*found.notes, sep="\n")
    for row in found.rows:
        print(
            h200_rows()[index]["name"],
            row.batch_size,
            f"time {row.time_error:+.1%}, memory {row.memory_error:+.2%}",
        )
    for row in found.rows:
        assert row.memory_error is not None and abs(row.memory_error) < 0.02, (
            h200_rows()[index]["name"],
            row,
        )
        assert row.fitted or abs(row.time_error) < 0.10, (h200_rows()[index]["name"], row)
