"""Hardware profiles: what a machine offers, which engines run the model there, and what their vendors refuse.

One TOML file per machine in `profiles/`, its name being the id; every number carries its source and a grade.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune import platform
from perilune.config.section import Section
from perilune.errors import ConfigError
from perilune.planner.precision import Precision
from perilune.planner.units import GiB, parse_rate, parse_size

PROFILES = Path(__file__).parent / "profiles"
GRADES = ("vendor", "third party", "calculated", "probed")
THIS = "this"


@dataclass(frozen=True)
class Figure:
    """A number in base units (bytes, bytes or operations per second, a share, a count), as written, and who says so."""

    amount: float
    text: str
    source: str
    grade: str


@dataclass(frozen=True)
class Refusal:
    """What a vendor excludes: for one architecture or for up to `max_devices` devices when given.

    `is_total` False: a way to run is refused, not the machine.
    """

    what: str
    reason: str
    source: str
    arch: str | None = None
    max_devices: int | None = None
    is_total: bool = True

    def applies(self, arch: str, num_devices: int) -> bool:
        return self.arch in (None, arch) and (self.max_devices is None or num_devices <= self.max_devices)


@dataclass(frozen=True)
class Engine:
    """One engine on one machine: the precisions it takes, its limits, layouts that are published, how it is set."""

    name: str
    source: str
    precisions: tuple[Precision, ...]
    published: dict[str, tuple[str, ...]]  # architecture -> labels of placements
    dcp: tuple[int, ...]
    settings: str
    settings_for: dict[str, str]  # value of a precision -> further settings
    usable: Figure | None = None  # share of the device's memory
    reserve: Figure | None = None  # bytes of activations, graphs and communication
    max_tp: Figure | None = None
    slots_per_request: int = 1
    dcp_shards_index: bool = True
    shards_everything: bool = False
    has_vision: bool = True
    is_perilune: bool = False


@dataclass(frozen=True)
class Hardware:
    """One machine of `devices_per_node` equal devices."""

    id: str
    name: str
    devices_per_node: Figure
    max_nodes: Figure
    memory: Figure  # of one device
    bandwidth: Figure | None  # of one device
    compute: Figure | None  # of one device: the highest dense rate stated
    efficiency: Figure | None
    engines: tuple[Engine, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]


# What `perilune serve` does today: one process on one machine, weights mapped as released, no vision yet.
PERILUNE = Engine(
    name="perilune",
    source="perilune serve --help",
    precisions=(Precision(), Precision(dense="float32", latent="float32", index="float32")),
    published=dict.fromkeys(("k3", "k31"), ("one device",)),
    dcp=(1,),
    settings="",
    settings_for={},
    has_vision=False,
    is_perilune=True,
)


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """The profile called `name`, or the machine this runs on for "this"; ConfigError naming the known ones."""
    if name == THIS:
        return probe()
    if name not in profile_names():
        raise ConfigError(f"--hardware is {name!r}; allowed: {THIS}, {', '.join(profile_names())}")
    return parse_hardware(name, tomllib.loads((PROFILES / f"{name}.toml").read_text(encoding="utf-8")))


def probe(memory_bytes: int | None = None, num_cpus: int | None = None) -> Hardware:
    """The machine at hand: memory this process may still take and its processors; nothing is timed."""
    available = platform.available_memory_bytes() if memory_bytes is None else memory_bytes
    cpus = platform.num_cpus() if num_cpus is None else num_cpus
    one = Figure(1, "1", "perilune runs on one machine today", "probed")
    free = Figure(available, str(GiB.of(available)), "free now, cut by memory cgroups", "probed")
    return Hardware(
        id=THIS,
        name=f"this machine, {cpus} processors",
        devices_per_node=one,
        max_nodes=one,
        memory=free,
        bandwidth=None,
        compute=None,
        efficiency=None,
        engines=(PERILUNE,),
        refusals=(),
        notes=("Not measured: memory bandwidth, arithmetic rate and disk, so no time per token is given.",),
    )


def parse_hardware(name: str, values: dict[str, Any]) -> Hardware:
    """Turns a parsed profile into a Hardware; ConfigError for an unknown key, grade or unit, naming file and key."""
    top = Section(values, f"{name}.toml")
    own = (PERILUNE,) if "runs_perilune" in top and top.boolean("runs_perilune") else ()
    hardware = Hardware(
        id=name,
        name=_text(top, "name"),
        devices_per_node=_required(top, "devices_per_node", "count"),
        max_nodes=_required(top, "max_nodes", "count"),
        memory=_required(top, "memory", "size"),
        bandwidth=_figure(top, "bandwidth", "rate"),
        compute=_figure(top, "compute", "rate"),
        efficiency=_figure(top, "efficiency", "share"),
        engines=own + tuple(_engine(Section(item, f"{name}.toml engine")) for item in top.get("engine", [])),
        refusals=tuple(_refusal(Section(item, f"{name}.toml refused")) for item in top.get("refused", [])),
        notes=tuple(top.get("notes", [])),
    )
    top.finish()
    return hardware


def _engine(section: Section) -> Engine:
    published = section.get("published", {})
    engine = Engine(
        name=_text(section, "name"),
        source=_text(section, "source"),
        precisions=tuple(Precision(**item) for item in section.get("precisions")),
        published={arch: tuple(labels) for arch, labels in published.items()},
        dcp=tuple(section.get("dcp", [1])),
        settings=_text(section, "settings"),
        settings_for=dict(section.get("settings_for", {})),
        usable=_figure(section, "usable", "share"),
        reserve=_figure(section, "reserve", "size"),
        max_tp=_figure(section, "max_tp", "count"),
        slots_per_request=section.integer("slots_per_request", default=1),
        dcp_shards_index=bool(section.get("dcp_shards_index", True)),
        shards_everything=bool(section.get("shards_everything", False)),
        has_vision=bool(section.get("has_vision", True)),
        is_perilune=bool(section.get("is_perilune", False)),
    )
    section.finish()
    return engine


def _refusal(section: Section) -> Refusal:
    refusal = Refusal(
        what=_text(section, "what"),
        reason=_text(section, "reason"),
        source=_text(section, "source"),
        arch=section.get("arch", None),
        max_devices=section.get("max_devices", None),
        is_total=bool(section.get("is_total", True)),
    )
    section.finish()
    return refusal


def _text(section: Section, key: str) -> str:
    value = section.get(key)
    if not isinstance(value, str) or not value:
        section.refuse(key, value, "a text")
    return value


def _required(section: Section, key: str, unit: str) -> Figure:
    figure = _figure(section, key, unit)
    if figure is None:
        raise ConfigError(f"{section.full_key(key)} is missing; it is required")
    return figure


def _figure(section: Section, key: str, unit: str) -> Figure | None:
    if key not in section:
        return None
    item = section.section(key)
    value, source, grade = item.get("value"), _text(item, "source"), _text(item, "grade")
    if grade not in GRADES[:3]:
        item.refuse("grade", grade, ", ".join(GRADES[:3]))
    item.finish()
    if unit == "size":
        return Figure(parse_size(value).num_bytes, value, source, grade)
    if unit == "rate":
        return Figure(parse_rate(value), value, source, grade)
    is_right = isinstance(value, int) and value >= 1 if unit == "count" else 0 < value <= 1
    if not is_right:
        item.refuse("value", value, "a count of at least 1" if unit == "count" else "a share above 0 and up to 1")
    return Figure(value, str(value), source, grade)
