"""What network.py and the processes of its machines tell each other, as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """A way of averaging.

    Attributes:
        name: as in the table.
        changes: `key=value` overrides of the recipe that make it.
        rank: of the compression; None: there is none.
        overlaps: whether it sends while the backward pass goes on.
    """

    name: str
    changes: list[str]
    rank: int | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class Settings:
    """What network.py asks for.

    Attributes:
        variants: the ways of averaging; the first is what the others are compared with.
        model: overrides that make the model's size.
        batch: samples a step, over both machines.
        rates: of the cable in Mbit/s; empty: there is no cable, and the machines are two processes.
        interfaces: each machine's, of the cable.
        addresses: each machine's.
        rounds, warm_up, steps: runs of each variant at each rate, and their steps before and while it is measured.
        out: JSON file for what was found.
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
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values | {"variants": [Variant(**variant) for variant in values["variants"]]})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class Measured:
    """One run.

    Attributes:
        variant, rate, round: which; a rate of 0: no limit.
        reached: Mbit/s that a bare transfer reached in each direction, both at once; 0 without a cable.
        seconds: of each measured step, by the clock.
        computed: the same by what this machine's process computed: without waits, and without what others computed.
        sent: bytes that left this machine's interface a step; 0 without a cable.
    """

    variant: str
    rate: float
    round: int
    reached: float
    seconds: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    sent: float = 0.0
