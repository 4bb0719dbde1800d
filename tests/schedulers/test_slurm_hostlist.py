from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from headway.errors import UsageError
from headway.schedulers.slurm.hostlist import expand


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("cn-l[084-085,090],gpu[1-3]", ["cn-l084", "cn-l085", "cn-l090", "gpu1", "gpu2", "gpu3"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_expands_in_order(hostlist: str, hosts: list[str]) -> None:
    assert expand(hostlist) == hosts


@pytest.mark.parametrize(
    "bad", ["", ",", "a,,b", "n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-2", "a b", "n[1-9999999]"]
)
def test_says_what_is_wrong(bad: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: .*expected a form like"):
        expand(bad)


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True)


numbered = st.tuples(names, st.integers(1, 4), st.lists(st.integers(0, 9999), min_size=1, max_size=6))


@given(st.lists(numbered, min_size=1, max_size=4))
def test_what_is_compressed_comes_back(groups: list[tuple[str, int, list[int]]]) -> None:
    """Any list of numbered hosts, written in brackets with any padding, expands to itself."""
    written = ",".join(
        f"{name}[{','.join(f'{n:0{width}d}' for n in numbers)}]" for name, width, numbers in groups
    )
    hosts = [f"{name}{n:0{width}d}" for name, width, numbers in groups for n in numbers]
    assert expand(written) == hosts


@given(names, st.integers(0, 500), st.integers(0, 50), st.integers(1, 4))
def test_a_range_is_the_list_of_its_numbers(name: str, first: int, more: int, width: int) -> None:
    last = first + more
    numbers = ",".join(f"{n:0{width}d}" for n in range(first, last + 1))
    assert expand(f"{name}[{first:0{width}d}-{last:0{width}d}]") == expand(f"{name}[{numbers}]")
