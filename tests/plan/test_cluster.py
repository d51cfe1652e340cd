"""Clusters: the catalog is whole, and a user's file is read or refused by its key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.core.errors import UsageError
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import InterNodeLink, find_cluster, load_clusters, load_devices

LINKS = "inside: {gb_s: 1, latency_us: 1}\nbetween: {ports: 1, gbit_s: 1, latency_us: 1, efficiency: 1}"

WHOLE = f"title: x\ndevice: v100\ndevices: 1\n{LINKS}\n"

OWN = (
    f"title: x\ndevices: 1\n{LINKS}\n".replace("{", "{{").replace("}", "}}")
    + "device: {{title: a, memory_gb: 1, memory_gb_s: 1, tflops: {{{tflops}}}}}"
)


def test_the_catalog_is_whole() -> None:
    for name, cluster in load_clusters().items():
        assert cluster.device_spec == load_devices()[cluster.device], name
        if cluster.between is None:
            continue
        network = cluster.build_network(4)
        assert (network.hosts, network.ranks_per_host) == (4, cluster.devices)
        assert network.between.bandwidth_bytes_s < cluster.between.ports * cluster.between.gbit_s * 1e9 / 8


@pytest.mark.parametrize("name", sorted(read_catalog("links")))
def test_every_link_can_be_named_in_a_file(name: str, tmp_path: Path) -> None:
    entry, path = read_catalog("links")[name], tmp_path / "mine.yaml"
    is_between = "efficiency" in entry
    # Kinds of networks have no rate of their own.
    rate = ", gbit_s: 7" if is_between and "gbit_s" not in entry else ""
    inside, between = ("pcie", name) if is_between else (name, "edr")
    links = f"inside: {{link: {inside}}}\nbetween: {{link: {between}, ports: 3{rate}}}\n"
    path.write_text(f"title: x\ndevice: gaudi-2\ndevices: 2\n{links}")
    cluster = find_cluster(str(path))
    link = cluster.between if is_between else cluster.inside
    assert link is not None
    assert {key: getattr(link, key) for key in entry} == entry
    assert link.link == name


def test_given_values_win_over_those_of_a_named_link() -> None:
    link = InterNodeLink.model_validate({"link": "hdr", "gbit_s": 180, "efficiency": 0.5})
    assert (link.ports, link.gbit_s, link.efficiency, link.latency_us) == (1, 180, 0.5, 14)


def test_rates_of_named_links_double() -> None:
    links = read_catalog("links")
    assert [links[name]["gbit_s"] for name in ("edr", "hdr", "ndr")] == [100, 200, 400]
    assert [links[name]["gb_s"] for name in ("pcie", "pcie-4", "pcie-5")] == [12, 24, 48]


def test_four_edr_ports_are_46_gigabytes_a_second() -> None:
    assert load_clusters()["dgx-1"].between.bytes_s == pytest.approx(46e9)


def test_spread_over_groups_the_narrow_links_are_shared() -> None:
    cluster = load_clusters()["dgx-a100"]
    far = cluster.between.model_copy(update={"oversubscription": 2.0, "group": 6})
    cluster = cluster.model_copy(update={"between": far})
    whole = cluster.build_network(12).between.bandwidth_bytes_s
    assert cluster.build_network(12, spread=True).between.bandwidth_bytes_s == whole / 2
    assert cluster.build_network(6, spread=True).between.bandwidth_bytes_s == whole


def test_a_file_of_the_same_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(load_clusters()["dgx-a100"].model_dump(mode="json")))
    assert find_cluster(str(path)) == load_clusters()["dgx-a100"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"title: x\ndevice: v100\ndevices: 0\n{LINKS}", "devices must be at least 1, not 0"),
        (f"title: x\ndevice: v1000\ndevices: 1\n{LINKS}", r"mine.yaml:2: .*no device 'v1000'.* Did you mean 'v100'"),
        ("title: x", "the key 'device' is missing"),
        ("- 1", "a cluster is a mapping of keys to values"),
        ("{1: 2}", "there is no key '1'"),
        (f"title: x\ndevice: v100\ndevices: 1\nalgorithms: [all_to_all]\n{LINKS}", "algorithms"),
        (OWN.format(tflops="mixed: 1"), "fp32"),
        (OWN.format(tflops="fp32: 0"), "fp32"),
        ("a: [", "mine.yaml:1: this is not YAML"),
        (f"{WHOLE}speed: 3", r"mine.yaml:6: there is no key 'speed'. Known here: algorithms, between"),
        (f"{WHOLE}node: {{watt: 3}}", r"mine.yaml:6: there is no key 'node.watt'. Did you mean 'node.watts'?"),
        (f"{WHOLE}nodes: eight", r"mine.yaml:6: nodes must be a whole number, not 'eight'."),
        (f"{WHOLE}nodes: 3\nnodes: 4", "mine.yaml:7: the key 'nodes' occurs twice"),
        (f"title: x\ndevice: 3\ndevices: 1\n{LINKS}", r"device must be a text or a mapping of keys to values"),
        (f"{WHOLE}pue: 9", r"mine.yaml:6: pue must be at most 3, not 9."),
        (f"{WHOLE}Node: {{cores: 4}}", r"mine.yaml:6: there is no key 'Node'. Did you mean 'node'?"),
        (f"{WHOLE}PUE: 9\nspeed: 3", r"(?s)no key 'PUE'.*no key 'speed'"),
        (f"{WHOLE}node: {{int: 40}}", r"there is no key 'node.int'"),
        (f"Title: x\ndevice: v100\ndevices: 1\n{LINKS}", r"(?s)no key 'Title'. Did you .*'title' is missing"),
        (OWN.format(tflops="FP32: 10").replace("title", "Title"), r"(?s)'device.tflops.FP32'.*'device.Title'"),
        (f"{WHOLE}algorithms: []", r"algorithms must be a list of 1 or more, not \[\]"),
        ("title: x\ndevice: v100\ndevices: 1\nbetween: {link: edd}", r"mine.yaml:4: .*no link 'edd' .*mean 'edr'"),
        ("title: x\ndevice: v100\ndevices: 1\nbetween: {link: pcie}", r"no link 'pcie' in the catalog. Known here: 1"),
        (f"{WHOLE}node:", r"node must be a mapping of keys to values, and it has no value"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(UsageError, match=said):
        find_cluster(str(tmp_path / "mine.yaml"))


def test_a_name_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dgx-11: there is no such cluster .* Did you mean 'dgx-1'"):
        find_cluster("dgx-11")
    with pytest.raises(UsageError, match=r"cannot be read .No such file"):
        find_cluster(str(tmp_path / "none.yaml"))


DOCS = (Path(__file__).parents[2] / "docs/plan.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    """The cluster of the docs."""
    (block,) = re.findall(r"```yaml\n(title: .*?)```", DOCS, re.S)
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def test_the_cluster_of_the_docs_is_one(tmp_path: Path) -> None:
    values = example()
    (inline,) = re.findall(r"or (\{title: .*?memory_gb_s: \d+\})", DOCS)
    for device in (values["device"], yaml.safe_load(inline.replace("title: ...", "title: mine"))):
        path = tmp_path / "ours.yaml"
        path.write_text(yaml.safe_dump({**values, "device": device}), encoding="utf-8")
        assert find_cluster(str(path)).devices == 8


@pytest.mark.parametrize("inside", ["{gb_s: .inf, latency_us: 1}", "{gb_s: 1, latency_us: .inf}", "{gb_s: .nan}"])
def test_what_is_not_finite_is_refused(tmp_path: Path, inside: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump({**example(), "inside": yaml.safe_load(inside)}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"inside\.(gb_s|latency_us) must be"):
        find_cluster(str(path))


ONE_BOX = "title: mine\ndevice: rtx-4090\ndevices: {devices}\n"


def test_a_box_needs_no_link_that_it_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ONE_BOX.format(devices=4) + "inside: {gb_s: 12, latency_us: 5.7}\n")
    box = find_cluster(str(path))
    assert box.most_nodes == 1
    assert box.build_network(1).inside.bandwidth_bytes_s == 12e9
    path.write_text(ONE_BOX.format(devices=1))
    assert find_cluster(str(path)).build_network(1).ranks == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE_BOX.format(devices=4), "inside is missing, the link between the 4 devices"),
        (
            ONE_BOX.format(devices=4) + "nodes: 3\ninside: {gb_s: 12, latency_us: 5.7}\n",
            "between is missing, the link from each of the 3 nodes",
        ),
    ],
)
def test_a_link_that_is_needed_is_asked_for(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        find_cluster(str(path))


def test_the_catalog_is_consistent() -> None:
    for name, cluster in load_clusters().items():
        assert cluster.device_spec.title, name
        network = cluster.build_network(1)
        assert network.inside.bandwidth_bytes_s > 0
    for name, device in load_devices().items():
        tf32, mixed = device.tflops.tf32, device.tflops.mixed
        assert mixed is None or mixed >= (tf32 or 0) >= 0, name
        assert tf32 is None or tf32 >= device.tflops.fp32, name
