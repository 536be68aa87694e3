import tomllib

import pytest

from perilune.errors import ConfigError
from perilune.planner.hardware import GRADES, PROFILES, load_hardware, parse_hardware, probe, profile_names

WANTED = {
    *["mi355x", "mi350x", "mi325x", "mi300x", "h20-3e", "h200", "b200", "b300", "gb300", "rtx-pro-6000"],
    *["atlas-800i-a3", "atlas-900-a3-superpod", "ascend-950dt", "ascend-950pr", "atlas-a2", "mtt-s5000"],
    *["dual-epyc-turin", "dual-xeon-6", "dual-xeon-ddr4", "m5-pro-64gb", "m4-max-128gb", "m3-ultra-512gb"],
    "desktop-nvme",
}


def values(name="mi355x"):
    return tomllib.loads((PROFILES / f"{name}.toml").read_text())


def numbers(node):
    if isinstance(node, dict) and "value" in node:
        yield node
    elif isinstance(node, dict):
        for child in node.values():
            yield from numbers(child)
    elif isinstance(node, list):
        for child in node:
            yield from numbers(child)


def test_every_platform_has_a_profile():
    assert set(profile_names()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_profile_reads_and_every_number_has_source_and_grade(name):
    hardware = load_hardware(name)
    assert hardware.id == name == name.lower()
    assert hardware.memory.amount > 0
    assert hardware.engines
    found = list(numbers(values(name)))
    assert len(found) >= 3
    for figure in found:
        assert figure["source"].strip()
        assert figure["grade"] in GRADES[:3]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--hardware is 'mi999'; allowed: this, ascend-950dt, .*rtx-pro-6000"):
        load_hardware("mi999")


@pytest.mark.parametrize("name", ["../mi355x", "", "MI355X", "mi355x.toml"])
def test_a_name_is_no_path(name):
    with pytest.raises(ConfigError, match="allowed: this"):
        load_hardware(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, r"x.toml.colour is not a known key"),
        ({"memory": {"value": "1", "source": "s", "grade": "vendor"}}, "size '1' is not understood"),
        ({"memory": {"value": "1 GB", "source": "s", "grade": "hearsay"}}, 'grade is "hearsay"; allowed: vendor'),
        ({"memory": {"value": "1 GB", "grade": "vendor"}}, "memory.source is missing"),
        ({"efficiency": {"value": 2, "source": "s", "grade": "vendor"}}, "a share above 0 and up to 1"),
        ({"devices_per_node": {"value": 0, "source": "s", "grade": "vendor"}}, "a count of at least 1"),
    ],
)
def test_a_wrong_profile_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_hardware("x", {**values(), **change})


def test_a_profile_without_memory_is_refused():
    changed = values()
    del changed["memory"]
    with pytest.raises(ConfigError, match=r"x.toml.memory is missing"):
        parse_hardware("x", changed)


def test_this_machine_is_probed_and_says_what_it_did_not_measure():
    hardware = probe(memory_bytes=8 * 2**30, num_cpus=4)
    assert (hardware.memory.amount, hardware.memory.text, hardware.memory.grade) == (8 * 2**30, "8.00 GiB", "probed")
    assert "4 processors" in hardware.name
    assert "Not measured: memory bandwidth" in hardware.notes[0]
    assert hardware.bandwidth is None
    assert load_hardware("this").memory.amount > 0
