"""Samples of a node's devices: what a row has, and that the sampling process comes and goes with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import has_ended, wait_until

from headway.dist.control.signals import STOP_SIGNALS
from headway.errors import UsageError
from headway.record.devices import __main__ as process, gpu, sampling
from headway.record.devices.node import NodeMeter
from headway.record.devices.sampling import sampling_devices
from headway.run import Run


def samples_of(run: Run, host: str) -> list[dict[str, Any]]:
    file = run.node_file(host)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_row_has_the_node_and_its_gpus(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(writing)  # the parent is gone: one row, then the end
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        process.main(str(run.path), "", "cn1", every_s=60)
    (row,) = samples_of(run, "cn1")
    memory = psutil.virtual_memory().total
    assert row["host"] == "cn1" and row["memory_total"] == memory and 0 < row["memory_used"] < memory
    assert not {"cpu", "network_sent", "disk_read"} & set(row), "there is nothing yet to count from"
    assert isinstance(row["gpus"], list)
    assert oct(run.node_file("cn1").stat().st_mode)[-3:] == "600"


def test_rates_are_those_between_two_samples() -> None:
    meter = NodeMeter()
    first, second = meter.sample(), meter.sample()
    rates = set(second) - set(first)
    assert "cpu" in rates and {"network_received", "network_sent"} <= rates and set(first) <= set(second)
    assert 0 <= second["cpu"] <= 1 and second["network_sent"] >= 0


def test_the_process_comes_and_goes_with_the_block(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "0.01")
    before = set(psutil.Process().children())
    with sampling_devices(run, host="cn1", delay_s=0):
        wait_until(lambda: len(samples_of(run, "cn1")) > 1, "two samples are written")
        (child,) = set(psutil.Process().children()) - before
    assert not child.is_running()
    assert run.device_log("cn1").read_text() == ""


def test_signals_to_the_run_do_not_end_the_process(run: Run) -> None:
    """SLURM may send them to all processes of the job."""
    sampler = sampling.DeviceSampler(run, host="cn1", every_s=0.01)
    sampler.start()
    assert sampler._process is not None
    try:
        for number in STOP_SIGNALS:  # its interpreter has just started
            sampler._process.send_signal(number)
        wait_until(lambda: samples_of(run, "cn1"), "a sample is written")
        for number in STOP_SIGNALS:
            sampler._process.send_signal(number)
        count = len(samples_of(run, "cn1"))
        wait_until(lambda: len(samples_of(run, "cn1")) > count + 1, "samples are written after the signals")
    finally:
        sampler.stop()


def test_a_process_that_outlives_its_kill_does_not_hold_up_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_KILLED_S", 0.05)
    sampler = sampling.DeviceSampler(run, host="cn1", every_s=60)
    # in place of a process in the kernel's uninterruptible sleep, which cannot be made here
    sampler._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(sampler._process, "kill", lambda: None)
    assert sampler._process.stdin is not None
    writing = os.dup(sampler._process.stdin.fileno())
    try:
        sampler.stop()
        assert sampler._process.poll() is None
    finally:
        os.close(writing)
        sampler._process.wait(20)


def test_a_process_whose_parent_was_killed_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "0.01")
    parent = os.fork()
    if parent == 0:
        with sampling_devices(run, host="cn1", delay_s=0):
            signal.pause()
    try:
        wait_until(lambda: samples_of(run, "cn1"), "a sample is written")
        (child,) = psutil.Process(parent).children()
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    wait_until(lambda: has_ended(child), "the process has ended")


def test_a_short_run_and_one_without_samples_start_no_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling.DeviceSampler, "start", lambda _: pytest.fail("started"))
    with sampling_devices(run, host="cn1"):
        pass
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "0")
    with sampling_devices(run, host="cn1", delay_s=0):
        pass
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "often")
    with pytest.raises(UsageError, match="give seconds, such as 15"), sampling_devices(run, host="cn1"):
        pass
    assert not run.nodes_dir.exists()


def test_samples_stop_once_the_run_is_anothers(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with run.lock() as first:
        number = first.fence.number
    with run.lock():
        with (tmp_path / "open").open("w+") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            process.main(str(run.path), str(number), "cn1", every_s=60)
        assert samples_of(run, "cn1") == []


def test_idle_clocks_are_not_throttled() -> None:
    import pynvml as nv

    mask = nv.nvmlClocksThrottleReasonGpuIdle | nv.nvmlClocksThrottleReasonApplicationsClocksSetting
    assert gpu.throttle_reasons(mask) == []
    assert gpu.throttle_reasons(mask | nv.nvmlClocksThrottleReasonSwThermalSlowdown) == ["heat"]


def test_a_sandbox_that_hides_its_disks_is_sampled_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise NotImplementedError("/proc/diskstats nor /sys/block are available on this system")

    monkeypatch.setattr(psutil, "disk_io_counters", hidden)
    meter = NodeMeter()
    meter.sample()
    rates = meter.sample()
    assert "network_sent" in rates and "disk_read" not in rates
