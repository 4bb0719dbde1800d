"""Samples of a real GPU agree with what torch knows about it."""

from __future__ import annotations

import pytest
import torch

from headway.record.devices.gpu import nvml_session, sample_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_sample_has_the_memory_that_torch_takes() -> None:
    # more than earlier tests left, which would be taken first
    size = torch.cuda.memory_reserved() + (1 << 30)
    with nvml_session() as handles:
        samples = [sample_gpu(index, handle) for index, handle in enumerate(handles)]
        before = next(
            each for each in samples if each["uuid"].endswith(str(torch.cuda.get_device_properties(0).uuid))
        )
        taken = torch.zeros(size, dtype=torch.uint8, device="cuda")
        after = sample_gpu(before["index"], handles[before["index"]])
        assert after["memory_used"] - before["memory_used"] >= taken.numel()
    assert before["memory_total"] >= torch.cuda.get_device_properties(0).total_memory
    assert 0 <= before["utilization"] <= 1 and 0 < before["power"] <= 1.2 * before["power_limit"]
    assert 0 < before["temperature"] < 110 and 0 < before["clock"] <= before["clock_max"]
    assert isinstance(before["throttling"], list)
