"""What network.py and the processes of its machines exchange as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """One way of averaging gradients.

    Attributes:
        name: its name in the table.
        changes: `key=value` overrides of the recipe that select it.
        rank: rank of the compression; None: no compression.
        overlaps: whether it sends during the backward pass.
    """

    name: str
    changes: list[str]
    rank: int | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class Settings:
    """The measurements that network.py asks for.

    Attributes:
        variants: the ways of averaging; the others are compared with the first one.
        model: overrides that set the size of the model.
        batch: samples per step, over both machines.
        rates: rates of the cable in Mbit/s; empty: there is no cable, and the machines are two ordinary processes.
        interfaces: network interface of the cable, of each machine.
        addresses: address of that interface, of each machine.
        rounds: runs of each variant at each rate.
        warm_up: steps of a run before the measurement.
        steps: measured steps of a run.
        out: JSON file for the results.
    """

    variants: list[Variant]
    model: list[str]
    batch: int
    rates: list[float]
    interfaces: list[str]
    addresses: list[str]
    rounds: int
    warm_up: int
    steps: int
    out: str

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values | {"variants": [Variant(**variant) for variant in values["variants"]]})

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class MeasuredRun:
    """The measurements of one run.

    Attributes:
        variant: name of the way of averaging.
        rate: rate of the cable in Mbit/s; 0: no limit.
        round: number of the round.
        reached: Mbit/s of a bare transfer in each direction, both at the same time; 0 without a cable.
        seconds: wall time of each measured step.
        computed: CPU time of this machine's process in each measured step: without waits and other programs' work.
        sent: bytes per step that left this machine's interface; 0 without a cable.
    """

    variant: str
    rate: float
    round: int
    reached: float
    seconds: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    sent: float = 0.0
