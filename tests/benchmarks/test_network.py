"""The benchmark of the network: bytes by hand, where compression pays, both kinds of cable, and refusals."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import network
from benchmarks.common import namespaces, reporting
from benchmarks.common.namespaces import Unavailable, limiting, two_machines
from benchmarks.common.network_settings import MeasuredRun, Settings
from benchmarks.network import PLAIN, break_even, emulated, relative_speed, variants
from benchmarks.network_rank import bytes_by_formula
from recipes.models.autoregressive.task import Autoregressive
from tests.ranks import launch

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--width", "64", "--layers", "1", "--batch", "2", "--ranks", "4", "--rounds", "1", "--warm-up", "1"]
EXCHANGE = "from benchmarks.common.namespaces import exchange; print(exchange({}, {}, 2_500_000))"


def no_namespaces():
    """Why namespaces cannot be made here, or None."""
    try:
        with two_machines():
            return None
    except Unavailable as error:
        return str(error)


@pytest.fixture
def namespaced():
    reason = no_namespaces()
    if reason:
        pytest.skip(f"no network namespaces: {reason}")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def leftovers():
    """Namespaces of this process; others may run the benchmark at the same time."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"pc{os.getpid()}")]


# --- without processes -------------------------------------------------------------------------


def test_bytes_by_hand():
    sizes = {"layers": 2, "width": 32, "heads": 2, "text_positions": 5, "text_vocabulary": 11, "side": 3, "codes": 7}
    task = Autoregressive(**sizes, kernel=3)
    everything = sum(p.numel() for p in task.parameters())
    assert bytes_by_formula(task, None) == 4 * everything  # 2 (W - 1) / W = 1 of two machines
    assert bytes_by_formula(task, None, 4) == 1.5 * 4 * everything
    # q, k, v and out 32 x 32, up 128 x 32, down 32 x 128: r (rows + columns) numbers of two bytes each.
    compressed = 2 * 2 * 3 * (4 * (32 + 32) + 2 * (128 + 32))
    assert bytes_by_formula(task, 3) == compressed + 4 * (everything - 2 * 12 * 32 * 32)


def test_where_compression_pays():
    assert break_even([100, 10_000], [10.0, 0.1]) == pytest.approx(1_000)
    assert break_even([100, 1_000, 10_000], [2.0, 0.5, 0.4]) == pytest.approx(math.sqrt(10) * 100)
    assert break_even([100, 1_000], [2.0, 1.1]) == math.inf
    assert break_even([100, 1_000], [0.9, 0.8]) is None
    assert [network.pays(rate) for rate in (None, math.inf, 1234.5)] == [
        "pays at none of these rates",
        "pays at all of these rates",
        "pays up to 1,200 Mbit/s",
    ]


def test_an_emulated_cable():
    """10 Mbit take 0.1 s at 100 Mbit/s: hidden by the computation of a longer step if it overlaps, otherwise added."""
    ways = variants([4])
    formula = dict.fromkeys((way.name for way in ways), 1.25e6)
    measured = [MeasuredRun(way.name, 0.0, 0, 0.0, [9.0, 9.0], [0.25, 0.5]) for way in ways]  # wall time is not used
    runs = emulated(measured, formula, ways, [10.0, 100.0])
    for name in (PLAIN, "rank 4, overlapped"):
        assert [run.seconds for run in runs if run.variant == name] == [[1.0, 1.0], [0.25, 0.5]]
    assert [run.seconds for run in runs if run.variant == "rank 4"] == [[1.25, 1.5], [0.35, 0.6]]
    assert relative_speed(runs, "rank 4", 10.0) == pytest.approx(1 / 1.375)


def test_ratios_are_of_the_same_round():
    runs = [MeasuredRun(PLAIN, 100.0, turn, 0, [s]) for turn, s in enumerate((1.0, 4.0, 9.0))]
    runs += [MeasuredRun("rank 4", 100.0, turn, 0, [s]) for turn, s in enumerate((1.0, 2.0, 3.0))]
    assert relative_speed(runs, "rank 4", 100.0) == 2.0


def test_a_failed_process_ends_the_other(tmp_path, monkeypatch):
    script = tmp_path / "benchmarks" / "network_rank.py"
    script.parent.mkdir()
    script.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(300)\n")
    monkeypatch.setattr(network, "ROOT", tmp_path)
    settings = Settings([], [], 2, [], ["lo"] * 2, ["127.0.0.1"] * 2, 1, 1, 1, str(tmp_path / "found.json"))
    with pytest.raises(RuntimeError, match="a machine's process failed"):
        network.run(settings, [network.LOOPBACK] * 2, tmp_path, 1)


WHERE = """
import json, os, sys
from pathlib import Path
settings = Path(sys.argv[1])
rank = os.environ["RANK"]
settings.with_name(f"{rank}.json").write_text(json.dumps([os.listdir("/sys/class/net"), dict(os.environ)]))
settings.with_name("found.json").write_text("7")
"""


def test_processes_run_in_their_namespaces(namespaced, tmp_path, monkeypatch):
    """Each sees its own end of the cable alone, and has the variables of a launcher with one process per machine."""
    script = tmp_path / "benchmarks" / "network_rank.py"
    script.parent.mkdir()
    script.write_text(WHERE)
    monkeypatch.setattr(network, "ROOT", tmp_path)
    with two_machines() as machines:
        interfaces, addresses = ([getattr(m, name) for m in machines] for name in ("interface", "address"))
        settings = Settings([], [], 2, [], interfaces, addresses, 1, 1, 1, str(tmp_path / "found.json"))
        assert network.run(settings, machines, tmp_path, 1) == 7
    for rank, interface in enumerate(interfaces):
        seen, environment = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(seen) & {*interfaces} == {interface}
        names = ("RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        wanted = [str(rank), str(rank), "2", "0", "1", addresses[0]]
        assert [environment[name] for name in names] == wanted
        assert environment["GLOO_SOCKET_IFNAME"] == interface and environment["MASTER_PORT"].isdigit()


def test_without_the_programs(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None)
    with pytest.raises(SystemExit, match="there is no program `ip`.*or with --emulate"):
        network.main(TINY)


# --- with namespaces ---------------------------------------------------------------------------


def test_namespaces_go_with_an_error(namespaced):
    with pytest.raises(KeyError), two_machines() as machines:
        assert {machine.namespace for machine in machines} <= {line.split()[0] for line in leftovers()}
        raise KeyError
    assert not any(machine.namespace in line for machine in machines for line in leftovers())


@pytest.mark.skipif(shutil.which("ip") is None, reason="no program `ip`")
def test_a_user_without_permission_is_told(monkeypatch):
    monkeypatch.setattr(namespaces, "_run", lambda *words: (_ for _ in ()).throw(Unavailable("`ip` says: no")))
    with pytest.raises(SystemExit, match="`ip` says: no; run it as root on Linux, or with --emulate"):
        network.main(TINY)


def test_the_cable_has_its_rate(namespaced):
    """Both ends are limited to 80 Mbit/s, and 2.5 MB pass each way."""
    with two_machines() as machines:
        addresses = [machine.address for machine in machines]
        processes = []
        for number, machine in enumerate(machines):
            subprocess.run(machine.command(limiting(machine.interface, 80.0)), check=True)
            show = machine.command(["tc", "qdisc", "show", "dev", machine.interface])
            assert "rate 80Mbit" in subprocess.run(show, check=True, capture_output=True, text=True).stdout
            command = machine.command([sys.executable, "-c", EXCHANGE.format(number, addresses)])
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        for process in processes:
            float(process.communicate(timeout=300)[0])  # the rate, which depends on other load
            assert process.returncode == 0


# --- whole runs --------------------------------------------------------------------------------


def check_table(record, link, rates):
    rows = record["rows"]
    assert [(row[f"{link}, Mbit/s"], row["averaging"]) for row in rows] == [
        (rate, name) for rate in rates for name in (PLAIN, "rank 4", "rank 4, overlapped")
    ]
    sent = [row["MB per step by formula"] for row in rows]
    assert sent == sent[:3] * len(rates)
    assert sent[1] == sent[2] < 0.7 * sent[0]
    return rows


def run_forked(settings, machines, folder, threads):
    """As `network.run`, in processes that need not import anything."""
    settings.write(folder / "settings.json")
    if machines[0].namespace:
        script = Path(__file__).with_name("namespace_rank.py")
        more = [machines[0].address, *(machine.namespace for machine in machines)]
    else:
        script, more = ROOT / "benchmarks" / "network_rank.py", []
    done = launch(2, script, folder / "settings.json", *more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(Path(settings.out).read_text())


@pytest.mark.slow
def test_emulated(results, monkeypatch):
    monkeypatch.setattr(network, "run", run_forked)
    network.main([*TINY, "--steps", "1", "--rates", "1000", "20", "--emulate"])
    record = json.loads((results / "network_emulated-d64-cpu.json").read_text())
    check_table(record, "emulated cable", [20, 1000])
    assert "The cable is emulated" in record["notes"]
    assert (results / "network_emulated-d64-cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_between_namespaces(namespaced, results, monkeypatch):
    """The kernel counts the bytes of the formulas, plus headers, acknowledgements and Composer's own messages."""
    monkeypatch.setattr(network, "run", run_forked)
    network.main([*TINY, "--steps", "2", "--rates", "20"])
    record = json.loads((results / "network-d64-cpu.json").read_text())
    for row in check_table(record, "cable", [20]):
        assert row["MB per step by formula"] < row["MB sent"] < 1.08 * row["MB per step by formula"] + 0.03
    assert all("reached" in row for row in record["rows"])
    assert not leftovers()
