"""Averages over ranks against a hand-written loop, in few collectives; optimizer state where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as td
from torch import Tensor, nn

from headway.dist.collective import averaging
from headway.dist.collective.averaging import average_gradients, average_parameters, optimizer_to
from headway.errors import UsageError
from headway.testing import ranks


def model(*, half: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 1))
    net[0].to(memory_format=torch.channels_last)  # a layout whose memory order is not its logical one
    if half:
        net[2].to(torch.bfloat16)
    return net


def fill_gradients(net: nn.Module, *, whole: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + td.get_rank())
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        noise = (noise * 64).round() if whole else noise  # whole numbers add up exactly in any order
        parameter.grad = torch.empty_like(parameter).copy_(noise)


def by_hand(tensors: list[Tensor]) -> list[Tensor]:
    averaged = []
    for tensor in tensors:
        copy = tensor.detach().clone()
        td.all_reduce(copy)
        copy /= td.get_world_size()
        averaged.append(copy)
    return averaged


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the elements of each all-reduce, below torch's Python functions."""
    sizes: list[int] = []
    real = td.all_reduce

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)  # type: ignore[arg-type]

    td.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        td.all_reduce = real


@ranks(2)
def test_gradients_equal_a_hand_written_loop_bit_for_bit() -> None:
    net = model(half=True)
    fill_gradients(net)
    expected = by_hand(gradients(net))
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    average_gradients(net)
    assert equal(gradients(net), expected)
    assert equal(list(net.parameters()), weights)


@ranks(4)
def test_gradients_of_four_ranks_equal_a_hand_written_loop() -> None:
    net = model()
    fill_gradients(net, whole=True)
    expected = by_hand(gradients(net))
    average_gradients(net.parameters())
    assert equal(gradients(net), expected)


@ranks(2)
def test_parameters_equal_a_hand_written_loop_and_gradients_stay() -> None:
    net = model(half=True)
    fill_gradients(net)
    before = [gradient.clone() for gradient in gradients(net)]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(td.get_rank())
    expected = by_hand(list(net.parameters()))
    average_parameters(net)
    assert equal(list(net.parameters()), expected)
    assert equal(gradients(net), before)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in net.parameters())


@ranks(2)
def test_weights_are_shares() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), float(td.get_rank()))
    average_gradients([parameter], weight=1 + 2 * td.get_rank())
    assert parameter.grad.tolist() == [0.75] * 4


@ranks(2)
def test_a_rank_without_samples_has_no_say_and_all_of_them_none_is_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([5.0 + td.get_rank()])
    average_gradients([parameter], weight=float(td.get_rank()))
    assert parameter.grad.item() == 6.0
    with pytest.raises(UsageError, match="weights of all ranks are 0"):
        average_gradients([parameter], weight=0.0)


@ranks(3)
def test_a_gradient_missing_on_some_ranks_counts_as_zero_and_missing_everywhere_stays_missing() -> None:
    rank = td.get_rank()
    net = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("all", "one", "none")})
    net["all"].weight.grad = torch.full((2, 2), 3.0)
    if rank == 1:
        net["one"].weight.grad = torch.full((2, 2), 6.0)
    average_gradients(net)
    assert net["all"].weight.grad.flatten().tolist() == [3.0] * 4
    assert net["one"].weight.grad.flatten().tolist() == [2.0] * 4
    assert net["none"].weight.grad is None


@ranks(2)
def test_a_missing_gradient_takes_the_dtype_that_the_parameter_asks_for() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    if td.get_rank() == 0:
        parameter.grad = torch.ones(2)
    average_gradients([parameter])
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [0.5, 0.5]


@ranks(2)
def test_a_model_travels_in_one_bucket_per_dtype() -> None:
    net = model(half=True)
    fill_gradients(net)
    with counted() as sizes:
        average_gradients(net)
    halves = sum(p.numel() for p in net.parameters() if p.dtype == torch.bfloat16)
    floats = sum(p.numel() for p in net.parameters() if p.dtype == torch.float32)
    # two small ones to agree: on the list of parameters, and on who has which gradients
    assert sizes == [2, len(list(net.parameters())) + 1, floats, halves]
    with counted() as sizes:
        average_parameters(net)
    assert sizes == [2, floats, halves]


@ranks(2)
def test_buckets_are_bounded() -> None:
    parameters = [nn.Parameter(torch.full((size,), float(td.get_rank()))) for size in (10, 10, 10, 50, 5)]
    with pytest.MonkeyPatch.context() as patch, counted() as sizes:
        patch.setattr(averaging, "BUCKET_BYTES", 100)
        average_parameters(parameters)
    assert sizes == [2, 20, 10, 50, 5]  # one above the bound travels alone
    assert all(parameter.eq(0.5).all() for parameter in parameters)


@ranks(2)
def test_different_models_are_an_error_on_every_rank_instead_of_a_hang() -> None:
    net = nn.Linear(2, 2 + td.get_rank())
    with pytest.raises(UsageError, match="different parameters"):
        average_parameters(net)
    fill_gradients(net)
    with pytest.raises(UsageError, match=re.escape(f"rank {td.get_rank()} has 2")):
        average_gradients(net)


@ranks(2)
def test_frozen_parameters_and_whole_numbers_are_left_alone() -> None:
    frozen = nn.Parameter(torch.full((2,), float(td.get_rank())), requires_grad=False)
    steps = nn.Parameter(torch.tensor([3 + td.get_rank()]), requires_grad=False)
    average_gradients([frozen, steps])
    assert frozen.grad is None
    average_parameters([frozen, steps])
    assert frozen.tolist() == [0.5, 0.5]
    assert steps.tolist() == [3 + td.get_rank()]


def test_alone_nothing_changes() -> None:
    net = nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    weight = net.weight.detach().clone()
    average_gradients(net, weight=5.0)
    average_parameters(net)
    assert net.weight.grad.eq(1).all()
    assert net.bias.grad is None
    assert torch.equal(net.weight, weight)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_senseless_weight_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="weight="):
        average_gradients(nn.Linear(1, 1), weight=weight)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        average_gradients(table)


# "meta" stands for another device: it is one, and it is everywhere.


def stepped(**options: object) -> torch.optim.AdamW:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], **options)  # type: ignore[arg-type]
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def devices(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    [state] = optimizer.state.values()
    return {key: value.device.type for key, value in state.items() if isinstance(value, Tensor)}


def test_the_state_moves_and_the_step_counter_stays_on_the_cpu() -> None:
    optimizer = stepped()
    optimizer_to(optimizer, "meta")
    assert devices(optimizer) == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_the_step_counter_moves_too_where_the_kernel_wants_it(option: str) -> None:
    optimizer = stepped(fused=option == "fused")
    optimizer.param_groups[0]["fused"] = False
    optimizer.param_groups[0][option] = True
    optimizer_to(optimizer, "meta")
    assert devices(optimizer) == {"step": "meta", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_lists_inside_the_state_move() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([parameter], max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer_to(optimizer, torch.device("meta"))
    [state] = optimizer.state.values()
    assert state["old_dirs"]
    assert {direction.device.type for direction in state["old_dirs"]} == {"meta"}
    assert isinstance(state["n_iter"], int)


def test_an_optimizer_without_state_is_left_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer_to(optimizer, "meta")
    assert not optimizer.state


def test_training_goes_on_where_it_was_after_a_move_and_back() -> None:
    optimizer, twin = stepped(), stepped()
    optimizer_to(optimizer, "cpu")
    for other in (optimizer, twin):
        [parameter] = other.param_groups[0]["params"]
        parameter.grad = torch.full((3,), 0.5)
        other.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], twin.param_groups[0]["params"][0])
