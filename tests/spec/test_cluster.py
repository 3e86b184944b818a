"""Clusters: sizes, links between devices, what dies together."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.spec.cluster import Link, load_cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import configs_folder

SIZES = {"npu-96": 96, "npu-100k": 100_000, "npu-1m": 1_000_000, "gpu-96": 96, "gpu-100k": 100_000}
SIZES |= {"gpu-1m": 1_000_000, "a100-96": 96, "cpu": 16}


def test_every_profile_has_as_many_devices_as_its_name_says() -> None:
    names = [path.stem for path in (configs_folder() / "clusters").glob("*.toml")]
    assert {name: load_cluster(name).num_devices for name in names} == SIZES


def test_devices_of_a_node_share_its_links_and_its_end() -> None:
    cluster = load_cluster("npu-96")
    assert [cluster.node_of(device) for device in (0, 7, 8, 95)] == [0, 0, 1, 11]
    assert cluster.link(0, 7) == cluster.inside
    assert cluster.link(7, 8) == cluster.between
    assert [cluster.domain_of(device) for device in (0, 7, 8)] == [0, 0, 1]
    with pytest.raises(BadUsage, match="npu-96 has devices 0 to 95, not 96"):
        cluster.node_of(96)


def test_a_transfer_takes_latency_and_bytes_and_a_ring_one_part_per_turn() -> None:
    link = Link(bandwidth=1e9, latency_s=1e-3)
    assert link.transfer_s(1e9) == pytest.approx(1.001)
    assert link.ring_s(4e9, 4) == pytest.approx(3 * 1.001)
    assert link.ring_s(4e9, 1) == 0


def test_collectives_inside_a_node_have_the_measured_bandwidth() -> None:
    cluster = load_cluster("npu-96")
    one = 2 * 7 * (cluster.inside.latency_s + 1e9 / 8 / 72e9)
    assert cluster.all_reduce_s(1e9, 8) == pytest.approx(one)
    assert cluster.all_reduce_s(1e9, 1) == 0
    # Three were not measured: the bandwidth of two.
    assert cluster.all_reduce_s(1e9, 3) == pytest.approx(2 * 2 * (cluster.inside.latency_s + 1e9 / 3 / 18e9))
    across = 2 * 15 * cluster.between.transfer_s(1e9 / 16)
    assert cluster.all_reduce_s(1e9, 16) == pytest.approx(across)


def test_a_cluster_of_the_users_own_is_a_file(tmp_path: Path) -> None:
    text = (configs_folder() / "clusters/npu-96.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("nodes = 12", "nodes = 3"))
    assert load_cluster(str(tmp_path / "mine.toml")).num_devices == 24
    (tmp_path / "bad.toml").write_text(text.replace('device = "ascend-910b"', "device = 7"))
    with pytest.raises(BadUsage, match=r"bad.toml: device is 7: name a profile of configs/devices, or a .toml file"):
        load_cluster(str(tmp_path / "bad.toml"))
