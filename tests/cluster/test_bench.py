"""The bench itself: is the cluster as real as the other tests believe?"""

from __future__ import annotations

import pytest

from .bench import Cluster

pytestmark = pytest.mark.cluster


def test_each_node_has_its_own_host_name(any_cluster: Cluster) -> None:
    names = any_cluster.srun("-N4", "hostname", check=True).stdout.split()
    assert sorted(names) == ["n1", "n2", "n3", "n4"]
