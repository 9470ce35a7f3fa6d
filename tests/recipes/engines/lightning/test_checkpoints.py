"""Files of checkpoints: what is kept, which one is the newest, and what is not one of this engine."""

import gc
import random
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from recipes.config.recipe import FSDP
from recipes.config.recipe import Checkpoints as Settings
from recipes.engines import generators
from recipes.engines.checkpoints.conversion import convert, from_composer, to_composer
from recipes.engines.checkpoints.plain_pickles import loadable
from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.counts import Counts
from recipes.engines.generators import generator_states, restore_generators, seed_all
from recipes.engines.lightning.checkpoint_format import read_file
from recipes.engines.lightning.checkpoints import Checkpoints
from recipes.engines.lightning.run import LightningRun
from recipes.engines.lightning.trainer import restore_saved
from recipes.engines.logs.loggers import RunLoggers
from recipes.training.lever import Lever
from recipes.training.levers import Levers


class Counter(Lever):
    """A lever with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Counting(torch.optim.SGD):
    """An optimizer whose state has no tensor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


class Batches:
    """A position in data."""

    def __init__(self, position=None):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def new_checkpoints(output, lever=None, fsdp=None, optimizer=torch.optim.AdamW, **settings):
    """Checkpoints of a linear layer that was trained for a step."""
    task = nn.Linear(2, 2)
    run = LightningRun(
        task,
        device=torch.device("cpu"),
        precision="fp32",
        duration="9ba",
        epoch_batches=4,
        microbatch=None,
        loggers=RunLoggers([]),
    )
    optimizer = optimizer(task.parameters(), lr=0.1)
    run.set_optimizer(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5))
    task(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    recipe = SimpleNamespace(
        output=str(output), checkpoints=Settings(**settings), training=SimpleNamespace(fsdp=fsdp)
    )
    levers = Levers(lever if isinstance(lever, list) else [lever or Counter()])
    parts = SimpleNamespace(levers=levers, callbacks={}, divided=False)
    batches = Batches(position=7)
    return Checkpoints(recipe, parts, run, batches), run, batches


def save_at(checkpoints, run, *batches):
    for batch in batches:
        run.counts = Counts(batch, 8 * batch, batch // 4, batch % 4, 8 * (batch % 4))
        checkpoints.save()


@pytest.mark.parametrize(("keep", "left"), [(1, {3}), (2, {2, 3}), (-1, {1, 2, 3})])
@pytest.mark.parametrize("fsdp", [None, FSDP(checkpoints="sharded")], ids=["full", "sharded"])
def test_the_newest_are_kept(tmp_path, keep, left, fsdp):
    checkpoints, run, _ = new_checkpoints(tmp_path, keep=keep, fsdp=fsdp)
    save_at(checkpoints, run, 1)
    end = "" if fsdp else ".ckpt"
    first, copy = (tmp_path / "checkpoints" / f"ep0-ba1{name}{end}" for name in ("", "-good"))  # a copy by its user
    shutil.copytree(first, copy) if fsdp else shutil.copy(first, copy)
    save_at(checkpoints, run, 2, 3)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "latest", copy.name, *(f"ep0-ba{batch}{end}" for batch in left)
    }  # fmt: skip
    assert (tmp_path / "checkpoints" / "latest").resolve().name == f"ep0-ba3{end}"


@pytest.mark.parametrize("names", [["bias"], ["weight", "bias"]], ids=["one", "all"])
@pytest.mark.parametrize("fsdp", [None, FSDP(checkpoints="sharded")], ids=["full", "sharded"])
def test_a_run_goes_on_without_moments_of_parameters_that_had_no_gradient(tmp_path, fsdp, names):
    first, run, _ = new_checkpoints(tmp_path, fsdp=fsdp)
    for name in names:
        del run.optimizer.state[getattr(run.task, name)]
    run.optimizer.param_groups[0]["initial_lr"] = 0.02
    save_at(first, run, 2)
    second, again, _ = new_checkpoints(tmp_path, fsdp=fsdp, autoresume=True)
    again.optimizer.state.clear()  # a new optimizer, of parameters without gradients
    again.optimizer.zero_grad()
    second.load()
    assert torch.equal(again.task.weight, run.task.weight)
    for name in ("weight", "bias"):
        state = again.optimizer.state.get(getattr(again.task, name)) or {}
        expected = run.optimizer.state.get(getattr(run.task, name)) or {}
        for moment in ("exp_avg", "exp_avg_sq"):
            zeros = torch.zeros_like(getattr(again.task, name))
            assert torch.equal(state.get(moment, zeros), expected.get(moment, zeros))


@pytest.mark.parametrize("fsdp", [None, FSDP(checkpoints="sharded")], ids=["full", "sharded"])
def test_a_run_goes_on_with_an_optimizer_that_keeps_numbers_alone(tmp_path, fsdp):
    """Of a full checkpoint PyTorch looked for the device of its tensors, and failed."""

    first, run, _ = new_checkpoints(tmp_path, fsdp=fsdp, optimizer=Counting)
    run.optimizer.step()
    save_at(first, run, 1)
    again, run, _ = new_checkpoints(tmp_path, fsdp=fsdp, optimizer=Counting)
    again.load()
    assert list(run.optimizer.state.values()) == [{"steps": 2}] * 2


@pytest.mark.parametrize("fsdp", [None, FSDP(checkpoints="sharded")], ids=["full", "sharded"])
def test_a_run_goes_on_with_all_of_its_state(tmp_path, fsdp):
    first, run, _ = new_checkpoints(tmp_path, Counter(5), keep=1, fsdp=fsdp)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.optimizer.param_groups[0]["initial_lr"] = 0.02  # as a callback may change it
    save_at(first, run, 2)
    lever = Counter()
    settings = {"keep": 1, "autoresume": True, "load_path": str(tmp_path)}  # where the run may once have begun
    second, again, batches = new_checkpoints(tmp_path, lever, fsdp=fsdp, **settings)
    again.scaler = torch.amp.GradScaler("cpu")
    assert again.counts == run.counts and again.counts.batch == 2
    batches.position = None
    second.load()
    assert lever.value == 5 and batches.position == 7 and len(second.generators) == 1
    for name, tensor in run.task.state_dict().items():
        assert torch.equal(tensor, again.task.state_dict()[name])
    for one, other in zip(run.task.parameters(), again.task.parameters(), strict=True):
        state = run.optimizer.state[one]
        assert all(torch.equal(tensor, again.optimizer.state[other][key]) for key, tensor in state.items())
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] == 0.05
    assert again._schedule.base_lrs == [0.02] and again.scaler.get_scale() == 8
    save_at(second, again, 3)  # and the checkpoint that it went on from is the older one
    assert not list((tmp_path / "checkpoints").glob("*ba2*"))
    third, run, _ = new_checkpoints(tmp_path, fsdp=fsdp, autoresume=True)
    run.task = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"another model: weight is \(2, 2\) in it and \(2, 3\) in the model"):
        third.load()


def test_levers_of_one_class_go_on_with_their_own_states(tmp_path):
    def labelled(*values):
        levers = [Counter(value) for value in values]
        for lever, label in zip(levers, ("one", "two"), strict=True):
            lever.label_in_recipe = label
        return levers

    first, run, _ = new_checkpoints(tmp_path, labelled(5, 6))
    save_at(first, run, 2)
    levers = labelled(0, 0)
    new_checkpoints(tmp_path, levers, autoresume=True)[0].load()
    assert [lever.value for lever in levers] == [5, 6]
    algorithms = as_algorithms(Levers(levers), None)[1:]  # Composer files states under the names of classes
    assert [(type(lever).__qualname__, lever.state_dict()["value"]) for lever in algorithms] == [
        ("Counter one", 5),
        ("Counter two", 6),
    ]


@pytest.mark.parametrize("value", [Path("a"), np.arange(3), lambda: 1, [{"a": Path("a")}]])
def test_a_state_that_no_run_could_load_is_not_saved(tmp_path, value):
    checkpoints, _, _ = new_checkpoints(tmp_path, Counter(value))
    message = r"^Counter: state_dict returns 'value' with a value that is not loaded .* \(.*(Path|Int64|lambda)"
    with pytest.raises(ValueError, match=message):
        checkpoints.save()
    (algorithm,) = as_algorithms(Levers([Counter(value)]), None)[1:]
    with pytest.raises(ValueError, match=message):
        algorithm.state_dict()
    assert not list(tmp_path.rglob("ep*"))


@pytest.mark.parametrize("value", [None, 3, "a", (1, [2.5, {"a": True}]), torch.ones(2), {4}, b"a"])
def test_plain_states_go_on(tmp_path, value):
    first, run, _ = new_checkpoints(tmp_path, Counter(value))
    save_at(first, run, 2)
    lever = Counter()
    new_checkpoints(tmp_path, lever, autoresume=True)[0].load()
    assert type(lever.value) is type(value) and str(lever.value) == str(value)


def test_a_state_that_a_checkpoint_lacks_by_its_name_is_told(tmp_path, caplog):
    """Where a second lever or callback of a class was added, the first one silently lost what it had."""
    first, run, _ = new_checkpoints(tmp_path, Counter(3))
    save_at(first, run, 2)
    levers = [Counter(), Counter()]
    levers[0].label_in_recipe, levers[1].label_in_recipe = "old", "new"
    new_checkpoints(tmp_path, levers, autoresume=True)[0].load()
    said = [record.getMessage() for record in caplog.records if "no state of" in record.getMessage()]
    assert [text.rpartition(" has ")[2] for text in said] == [
        "no state of Counter old, which begins anew", "no state of Counter new, which begins anew"
    ]  # fmt: skip


def test_the_weights_of_a_module_in_a_state_are_not_looked_at():
    """They may be many, and DTensors, which are saved as weights are."""

    class Many(torch.Tensor):
        def __reduce_ex__(self, protocol):
            raise AssertionError("written")

    weights = nn.Linear(2, 2).state_dict()
    weights["weight"] = weights["weight"].as_subclass(Many)
    state = {"average": weights}
    assert loadable("Mine", state) is state


@pytest.mark.parametrize("state", [None, [1], torch.zeros(1)])
def test_a_state_is_a_dict(state):
    with pytest.raises(ValueError, match="^Mine: state_dict returns an instance of .*; return a dict, which may be "):
        loadable("Mine", state)


def test_what_is_saved_when(tmp_path):
    for save, saved in (False, []), (True, ["ep0-ba9.ckpt", "latest"]):
        checkpoints, run, _ = new_checkpoints(tmp_path, save=save)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        run.counts = Counts(9)
        checkpoints.save_if_due()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == saved
    (tmp_path / "checkpoints" / saved[0]).unlink()
    checkpoints.save_and_wait()  # there is one of this batch
    assert not (tmp_path / "checkpoints" / saved[0]).exists()


class Keeper(Counter):
    """Keeps a copy of its tensor, and finds out what files this process has in its memory while it loads."""

    def state_dict(self):
        return {"value": torch.arange(1000)}

    def load_state_dict(self, state):
        self.value, self.maps = state["value"].clone(), maps()


class Taker(Counter):
    """A callback, which may keep what it is given."""

    def state_dict(self):
        return {"value": torch.arange(2000)}


def maps():
    gc.collect()
    return Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is in memory")
def test_the_file_is_in_memory_only_while_it_is_loaded(tmp_path):
    """Each rank of a machine would otherwise hold all of an average."""
    first, run, _ = new_checkpoints(tmp_path, Keeper())
    first._parts.callbacks = {"taker": Taker()}
    save_at(first, run, 2)
    lever, taker, new = Keeper(), Taker(), Counter(7)
    second, again, _ = new_checkpoints(tmp_path, lever)
    second._parts.callbacks = {"taker": taker, "new": new}
    second.load()
    assert new.value == 7  # a callback of which the checkpoint has no state
    assert "ep0-ba2.ckpt" in lever.maps and "ep0-ba2.ckpt" not in maps()
    assert torch.equal(taker.value, torch.arange(2000)) and torch.equal(lever.value, torch.arange(1000))


def test_without_autoresume_a_run_begins(tmp_path):
    first, run, _ = new_checkpoints(tmp_path)
    save_at(first, run, 2)
    second, again, _ = new_checkpoints(tmp_path, autoresume=False)
    assert second.path is None and again.counts == Counts()


def test_checkpoints_that_cannot_be_loaded_are_refused_in_one_line(tmp_path):
    tmp_path /= "a run"
    (tmp_path / "checkpoints").mkdir(parents=True)
    of_composer = tmp_path / "checkpoints" / "latest-rank0.pt"
    torch.save({"state": {}, "rng": []}, of_composer)
    said = "latest-rank0.pt: not a checkpoint of the engine lightning; .*; give that$"
    with pytest.raises(ValueError, match=said) as error:
        new_checkpoints(tmp_path, load_path=str(of_composer), autoresume=False)
    assert shlex.split(str(error.value).split("`")[1])[2:] == [str(of_composer), "--to", "lightning"]
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        new_checkpoints(tmp_path, load_path=str(tmp_path / "none.ckpt"), autoresume=False)
    with pytest.raises(ValueError, match="copy the checkpoint to one first"):
        new_checkpoints(tmp_path, load_path="oci://bucket/none.ckpt", autoresume=False)
    with pytest.raises(ValueError, match="not a checkpoint of Composer"):
        convert(of_composer, "lightning")
    of_composer.rename(of_composer.with_name("ep0-ba1-rank0.pt"))
    for folder in (tmp_path, tmp_path / "checkpoints"):
        several = r"is a folder of checkpoints; name one of them, such as .*/ep0-ba1-rank0.pt$"
        with pytest.raises(ValueError, match=several):
            convert(folder, "lightning")
        with pytest.raises(ValueError, match=several):
            new_checkpoints(tmp_path / "new", load_path=str(folder))


def same(one, other):
    """Whether two nested values are equal, tensors bit by bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_conversion_there_and_back_changes_nothing(tmp_path, monkeypatch):
    checkpoints, run, _ = new_checkpoints(tmp_path, Counter(3))
    save_at(checkpoints, run, 6)
    path = tmp_path / "checkpoints" / "ep1-ba6.ckpt"
    with pytest.raises(ValueError, match="ep1-ba6.ckpt: already a full checkpoint of the engine lightning; nothing is"):
        convert(path, "lightning")
    with pytest.raises(ValueError, match="ep1-ba6-rank0.pt: already a full checkpoint of the engine composer; nothing"):
        convert(convert(path, "composer"), "composer")
    before = read_file(path)
    after = from_composer(to_composer(before))
    assert after.keys() == before.keys()
    assert same(after, before)
    load, mapped = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *args, **more: mapped.append(more["mmap"]) or load(*args, **more))
    there = convert(tmp_path / "checkpoints" / "latest", "composer")
    assert there.name == "ep1-ba6-rank0.pt" and there.with_name("latest-rank0.pt").resolve() == there
    (tmp_path / "checkpoints" / "ep1-ba6.ckpt").unlink()
    back = convert(there.with_name("latest-rank0.pt"), "lightning")
    assert mapped and all(mapped)  # tensors go from file to file, without a copy of all of them in memory
    assert same(read_file(back), before)


def test_generators_of_a_run_without_a_batch_are_those_that_it_got(tmp_path):
    seed_all(3)
    first, run, _ = new_checkpoints(tmp_path)
    save_at(first, run, 2)
    expected = torch.get_rng_state()
    torch.rand(1)
    complete, run, _ = new_checkpoints(tmp_path)
    complete.load()
    save_at(complete, run, 3)
    third, _, _ = new_checkpoints(tmp_path)
    third.load()
    assert torch.equal(third.generators[0]["torch"], expected)
    restore_saved(third)
    torch.rand(1)
    assert third.generators is None and not torch.equal(third._state()["generators"][0]["torch"], expected)


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize(
    ("rank", "world", "expected"), [(0, 2, 3), (1, 2, 4), (0, 1, 3), (1, 3, 4), (2, 3, 5), (3, 4, 5)]
)
def test_generators_go_on_where_they_were(monkeypatch, capsys, rank, world, expected):
    """Of two ranks with the seeds 3 and 4. Ranks that were not there keep their own, here of the seed 5."""
    states, draws = [], {}
    for seed in (3, 4, 5):
        seed_all(seed)
        states += generator_states()
        draws[seed] = drawn()
        seed_all(seed)
        assert drawn() == draws[seed]
    monkeypatch.setattr(generators, "rank", lambda: rank)
    monkeypatch.setattr(generators, "world_size", lambda: world)
    seed_all(5)
    restore_generators(states[:2])
    assert drawn() == draws[expected]
    said = f"generators: the checkpoint has those of 2 ranks, this run has {world} ranks"
    assert (said in capsys.readouterr().out) == (world != 2)


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_generator_that_would_read_behind_its_numbers_is_refused(position):
    (state,) = generator_states()
    before = np.random.get_state()[2]
    state["numpy"] = (*state["numpy"][:2], position, *state["numpy"][3:])
    with pytest.raises(ValueError, match=f"NumPy's is at {position} of its numbers"):
        restore_generators([state])
    assert np.random.get_state()[2] == before


def test_a_lever_gets_the_state_that_it_gave_from_composer_too():
    class Keeper(Counter):
        def load_state_dict(self, state):
            self.loaded = state

    _, algorithm = as_algorithms(Levers([keeper := Keeper(3)]), None)
    algorithm.load_state_dict(algorithm.state_dict())
    assert keeper.loaded == {"value": 3}
