"""Joining on a GPU: what NVML says, seeds of CUDA's generators, optimizer state, and the interconnect over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.dist.collective.averaging import optimizer_to
from headway.dist.seeding import seed
from headway.dist.topology.machine import detect
from headway.dist.topology.nvml import read_driver, read_gpus
from headway.doctor import checks, probes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_nvml_and_torch_see_the_same_gpu() -> None:
    seen = torch.cuda.get_device_properties(0)
    assert str(seen.uuid) in {gpu.uuid.removeprefix("GPU-") for gpu in read_gpus()}
    assert seen.name in {gpu.name for gpu in read_gpus()}
    driver = read_driver()
    assert driver is not None
    assert torch.version.cuda is not None
    assert driver.cuda[0] >= int(torch.version.cuda.split(".")[0])
    assert json.loads(json.dumps(detect().to_dict()))["gpus"][0]["memory"] >= seen.total_memory


def test_the_doctor_finds_the_gpu_good() -> None:
    check = checks.gpus(
        detect(), read_driver(), torch_cuda=probes.torch_cuda(), device_files=probes.count_gpu_files()
    )
    assert check.verdict == "ok", check


def test_cuda_generators_follow_the_seed() -> None:
    seed(5)
    first = torch.rand(8, device="cuda")
    seed(5)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    seed(6)
    assert not torch.equal(torch.rand(8, device="cuda"), first)


@pytest.mark.parametrize(
    ("options", "step"), [({}, "cpu"), ({"fused": True}, "cuda"), ({"capturable": True}, "cuda")]
)
def test_training_goes_on_after_a_move_to_the_gpu(options: dict[str, bool], step: str) -> None:
    """Built and stepped on the CPU, moved, stepped again: as an optimizer that was on the GPU all along."""

    def steps(*devices: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for device in devices:
            model.to(device)
            optimizer.param_groups[0].update(options if device == "cuda" else {})
            optimizer_to(optimizer, device)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert {state["step"].device.type for state in optimizer.state.values()} == {step}
        return model.weight.detach().cpu()

    torch.testing.assert_close(steps("cpu", "cuda"), steps("cuda", "cuda"))


RANK = """
import datetime, json, os, sys
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["NCCL_HOSTID"] = f"host{rank}"  # NCCL refuses two ranks on one GPU, unless they seem to be on two hosts
import torch, torch.distributed as td
from headway.dist.topology.interconnect import check_interconnect
td.init_process_group(sys.argv[4], store=td.FileStore(f"{folder}/store", world), rank=rank, world_size=world,
                      timeout=datetime.timedelta(seconds=60))
result = check_interconnect(megabytes=4)
if rank == 0:
    print(json.dumps(result.to_dict()))
    print(result.table(), file=sys.stderr)
td.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_interconnect_of_ranks_that_share_this_gpu(tmp_path: Path, backend: str) -> None:
    world = 3
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(tmp_path), backend],
            stdout=subprocess.PIPE,
            env={**os.environ, "NCCL_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    facts = json.loads(outputs[0])
    assert facts["device"] == "cuda"
    assert facts["all_reduce_wrong"] == [0] * world
    assert len(facts["links"]) == world * (world - 1)
    assert all(link["wrong"] == 0 and link["gigabytes_per_second"] > 0 for link in facts["links"])
