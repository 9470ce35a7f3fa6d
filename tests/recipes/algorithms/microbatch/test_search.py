"""The search for the largest microbatch in a run: that training is as without, and what it remembers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from composer import Callback, Evaluator, Trainer
from torch import nn

from recipes.algorithms.averaging.average import Average
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.microbatch.device_memory import DeviceMemory, Reading
from recipes.algorithms.microbatch.search import HEADROOM, MicrobatchSearch
from recipes.algorithms.modules.compile import Compile
from recipes.engines.composer.model import ComposerTask
from recipes.engines.parts import Place, build_levers
from recipes.models.contrastive.task import ContrastiveText
from recipes.training.levers import Levers
from tests.recipes.algorithms.composer_levers import algorithms_of
from tests.recipes.algorithms.microbatch.microbatch_ranks import CHECKS
from tests.recipes.algorithms.microbatch.small import MB, FakeMemory, Line, data
from tests.recipes.training.fake_run import FakeRun


class Seen(Callback):
    """Microbatch, loss and weights of every batch."""

    def __init__(self):
        self.sizes, self.losses, self.weights, self.eval_sizes = [], [], [], []

    def before_forward(self, state, logger):
        self.sizes.append((state.timestamp.batch.value, len(state.batch["x"])))

    def eval_before_forward(self, state, logger):
        self.eval_sizes.append(len(state.batch["x"]))

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss_dict["loss/train/total"])
        self.weights.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]).cpu())


@pytest.fixture(autouse=True, scope="module")
def no_trials():
    """An encode job of an earlier test may have left this on; each size would then be trained once more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", False)
        yield


def run(
    memory=None,
    microbatch=1,
    duration="10ba",
    batch=24,
    levers=(),
    optimizer=torch.optim.AdamW,
    task=None,
    **options,
):
    """A finished run, its search and what was seen of it; memory: a fake one, "gpu" for the real one, or no search."""
    task, seen = task or Line(), Seen()
    for lever in levers:
        lever.task = task
    search = []
    if memory is not None:
        average = next((lever for lever in levers if isinstance(lever, ScheduledEMA)), None)
        compiled = [lever for lever in levers if isinstance(lever, Compile)]
        search.append(MicrobatchSearch(task, batch, None if memory == "gpu" else memory, average, compiled))
    made = Trainer(
        model=ComposerTask(task),
        train_dataloader=data(batch),
        max_duration=duration,
        optimizers=optimizer(task.parameters(), lr=0.05),
        algorithms=algorithms_of([*levers, *search], task),
        callbacks=[seen],
        device_train_microbatch_size=microbatch,
        progress_bar=False,
        **{"device": "cpu", **options},
    )
    if isinstance(memory, FakeMemory):
        memory.state = made.state
    made.fit()
    made.close()
    return made, (search or [None])[0], seen


# --- a run -----------------------------------------------------------------------------------------------------------


def test_the_search_remembers_that_it_went_down():
    run, full = FakeRun(), Reading(0, 10 * MB, 10 * MB)
    run.task.compares_samples = False
    run.optimizer.state[run.task.weight] = {"step": 1}
    search = MicrobatchSearch(run.task, 64, SimpleNamespace(read=lambda: full))
    search.size, search.warm, search.device_batch = 16, True, 64
    search.step_end(run)
    assert search.size == run.microbatch == search.plan.ceiling == 8


def test_training_is_that_of_any_other_microbatch():
    memory = FakeMemory(held=1_000 * MB, fixed=500 * MB, each=500 * MB)  # 0.9 * 10 - 1.5 GB: 15 samples
    _, search, seen = run(memory)
    assert memory.sizes == [1, 1, 2, 8, 12] and search.settled
    assert [size for batch, size in seen.sizes if batch >= 4] == [12] * 12
    _, _, whole = run(microbatch=24)
    for one, other in zip(seen.weights, whole.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert seen.losses == pytest.approx(whole.losses, rel=1e-6)  # summed in 32 bits


def test_what_cudnn_tries_with_a_new_size_does_not_count(monkeypatch):
    """The largest workspace of all of its algorithms, which the chosen one does not need."""

    class Trials(FakeMemory):
        def read(self):
            new = self.sizes[-1] not in self.sizes[:-1]
            return replace(super().read(), growth=super().read().growth + 4_000 * MB * new)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    memory = Trials(held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    _, search, _ = run(memory)
    assert memory.sizes == [1, 1, 2, 2, 8, 8, 12, 12] and search.settled


def test_what_a_run_says_and_logs(capsys):
    run(FakeMemory(held=1_000 * MB, fixed=500 * MB, each=500 * MB))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("microbatch")]
    assert lines == ["microbatch: 12 of 24 samples per device take 7.5 of 10.0 GB; tried 1, 2, 8, 12"]


def test_validation_takes_the_same():
    _, _, seen = run(
        FakeMemory(each=500 * MB),
        eval_dataloader=Evaluator(label="val", dataloader=data(), device_eval_microbatch_size=1),
    )
    assert seen.eval_sizes == [2] * 24 + [12] * 16  # a pass over 48 samples every second batch


def test_too_large_goes_down_and_stays():
    """More than proportional growth, which no line foresees: the search comes back."""

    class Steep(FakeMemory):
        def growth(self, size):
            return 10 * MB * size**2

    memory = Steep(usable=1_000 * MB, held=0)
    _, search, _ = run(memory, duration="14ba")
    assert search.settled and memory.growth(search.size) <= 900 * MB
    peak = memory.sizes.index(max(memory.sizes))
    assert memory.sizes[peak:] == sorted(memory.sizes[peak:], reverse=True)


def test_without_optimizer_state_nothing_is_measured():
    """A gradient scaler may skip the first steps."""

    class Late(torch.optim.AdamW):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure) if self.calls > 3 else None

    memory = FakeMemory()
    run(memory, optimizer=Late)
    assert memory.sizes[:5] == [1, 1, 1, 1, 2]


def test_norms_that_compare_samples_are_refused():
    """During the search they normalised each sample by itself, and updated their averages by it."""
    task = Line()
    task.norm = nn.SyncBatchNorm(3)
    with pytest.raises(ValueError, match=r"^training.microbatch: auto would .*: norm \(SyncBatchNorm\) has stat"):
        MicrobatchSearch(task, 24)
    task.norm.eval()  # a part that is not trained
    MicrobatchSearch(task, 24)


def test_an_optimizer_without_a_state_is_measured_too():
    """The run went on with microbatches of 1 sample to its end."""
    memory = FakeMemory()
    _, search, _ = run(memory, optimizer=torch.optim.SGD)
    assert memory.sizes == [1, 1, 1, 1, 1, 2, 6] and search.settled


def test_a_batch_with_fewer_samples_is_not_measured():
    """The last one of an epoch may have less than a microbatch of them."""
    memory, run = FakeMemory(), FakeRun(Line())
    memory.state = SimpleNamespace(device_train_microbatch_size=1)
    search = MicrobatchSearch(run.task, 20, memory)
    run.optimizer.state[0] = {"moment": 0}
    measured = []
    for samples in (20, 8, 20):
        run.batch = {"x": torch.zeros(samples, 3)}
        search.batch_start(run)
        search.step_end(run)
        measured.append(list(search.plan.growth))
    assert measured == [[], [], [1]]


def test_room_is_left_for_an_average_that_comes_later():
    def later(**options):
        return ScheduledEMA(decay=0.9, **options)

    made, _, _ = run()
    size = Average(made.state.model).bytes
    assert size == sum(p.numel() * p.element_size() for p in made.state.model.parameters())
    assert size > 100
    memory = {"usable": int(12_100 / HEADROOM), "held": 0, "fixed": 0, "each": 1_000}  # 12 samples and 100 bytes
    assert run(FakeMemory(**memory))[1].size == 12
    for ema, largest in ((later(start="9ba"), 8), (later(start="9ba", device="cpu"), 12), (later(), 12)):
        made, search, _ = run(FakeMemory(**memory), levers=[ema])
        assert search.size == largest, ema.device
        assert ema.bytes_to_come() == 0


def test_what_is_compiled_is_compiled_for_the_size_that_was_found(monkeypatch):
    """And measured with it: here it takes more, and the size goes down again."""
    seen = []

    def compile_(function, **options):
        def compiled(x):
            seen.append(len(x))
            return function(x)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)

    class Compiled(FakeMemory):
        def growth(self, size):
            return super().growth(size) * (3 if seen else 1)

    class Watched(Compile):
        pauses = []

        def pause(self, paused):
            self.pauses.append(paused)
            super().pause(paused)

    compile_it = Watched(None, backend="aot_eager")
    memory = Compiled(held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    _, search, _ = run(memory, levers=[compile_it], duration="14ba")
    assert memory.sizes == [1, 1, 2, 8, 12, 12, 12, 8, 8, 4, 4] and search.size == 4
    assert seen == [12] * 2 * 2 + [8] * 3 * 2 + [4] * 6 * 5
    assert compile_it.pauses == [True, False, False, False]  # CUDA graphs of one size do not run another


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("microbatch")
    memory = FakeMemory(held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    _, _, seen = run(memory, save_folder=str(folder), save_interval="1ba", save_filename="ba{batch}.pt")
    return folder, seen


def test_a_resumed_run_does_not_search(saved, capsys):
    folder, whole = saved
    memory = FakeMemory(held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    _, search, seen = run(memory, load_path=str(folder / "ba6.pt"))
    assert memory.sizes == [] and search.size == 12
    assert {size for _, size in seen.sizes} == {12}
    assert torch.equal(seen.weights[-1], whole.weights[-1])
    assert "microbatch: 12 of 24 samples per device, as in the checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{}, {"devices": 2}, {"memory": 1}, {"batch": 48}, {"samples": {"x": [4]}}, {"precision": "amp_bf16"}],
    ids=lambda change: next(iter(change), "none"),
)
def test_a_result_is_that_of_the_same_samples_on_the_same_devices(change):
    def at_first_batch(found):
        memory, run = FakeMemory(), FakeRun(Line())
        memory.state, run.batch = SimpleNamespace(device_train_microbatch_size=1), {"x": torch.zeros(24, 3)}
        search = MicrobatchSearch(run.task, 24, memory)
        search.load_state_dict({"found": found})
        search.batch_start(run)
        return search, run

    found = {"size": 12, **at_first_batch(None)[0].place, **change}
    search, run = at_first_batch(found)
    assert (search.settled, run.microbatch) == ((False, None) if change else (True, 12))
    assert search.state_dict() == ({} if change else {"found": found})


def test_a_resumed_run_searches_anew_where_it_must(saved, capsys):
    folder, _ = saved
    memory = FakeMemory(5_000 * MB, held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    _, search, _ = run(memory, load_path=str(folder / "ba5.pt"))
    assert memory.sizes[:3] == [1, 1, 2] and search.size < 12
    assert "searching again, as the checkpoint's result is for other memory" in capsys.readouterr().out
    memory = FakeMemory(held=1_000 * MB, fixed=500 * MB, each=500 * MB)
    run(memory, load_path=str(folder / "ba3.pt"), duration="9ba")  # the search had not ended
    assert memory.sizes[:3] == [1, 1, 2]


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_a_recipe_on_a_cpu_takes_the_whole_batch(small_recipe, fit, tmp_path, capsys):
    trainer = fit(small_recipe(tmp_path, "training.microbatch=auto", "training.duration=1ba"))
    assert trainer.state.device_train_microbatch_size == 8
    assert "microbatch: all 8 samples per device; auto measures a GPU's memory" in capsys.readouterr().out


def test_a_recipe_on_a_gpu_searches(small_recipe, monkeypatch):
    monkeypatch.setattr("recipes.algorithms.microbatch.search.DeviceMemory", FakeMemory)
    changes = ["algorithms.compile={name: compile}", "algorithms.ema={name: scheduled_ema, decay: 0.9}"]

    def searches(*overrides, use_gpu=True):
        place = Place(use_gpu=use_gpu, precision="amp_bf16", local_world_size=1)
        levers = build_levers(small_recipe("unused", *overrides), place, {"task": Line()}, batch=8)
        return [lever for lever in levers if isinstance(lever, MicrobatchSearch)], levers

    (search,), levers = searches("training.microbatch=auto", *changes)
    assert search is levers[-1] and search.batch == 8 and search.average in levers
    assert search.compiled == [lever for lever in levers if isinstance(lever, Compile)] != []
    assert searches()[0] == searches("training.microbatch=auto", use_gpu=False)[0] == []


def test_a_recipe_searches_with_noise_and_resumes_exactly(small_recipe, tmp_path):
    """A run that went on with the result of its first part ends as the one without a stop."""
    from recipes.engines.composer.trainer import new_trainer
    from recipes.engines.parts import build_parts

    place = Place(use_gpu=False, precision="fp32", local_world_size=1)
    ends = []
    for name, durations in (("whole", ["12ba"]), ("parts", ["8ba", "12ba"])):
        for duration in durations:
            changes = [f"training.duration={duration}", "checkpoints.autoresume=true", "training.microbatch=1"]
            recipe = small_recipe(tmp_path / name, *changes)
            torch.manual_seed(recipe.seed)
            parts = build_parts(recipe, place, "composer")
            memory = FakeMemory(each=2_000 * MB)
            search = MicrobatchSearch(parts.task, 8, memory)
            optimizer = parts.new_optimizer([p for p in parts.task.parameters() if p.requires_grad])
            made = new_trainer(recipe, place, replace(parts, levers=Levers([*parts.levers, search])), optimizer)
            memory.state = made.state
            made.fit()
            made.close()
        ends.append(torch.cat([p.detach().flatten() for p in made.state.model.parameters()]))
        assert made.state.device_train_microbatch_size == 2
    assert torch.equal(*ends)


def test_a_loss_over_pairs_is_refused():
    task = ContrastiveText(
        width=8, layers=1, heads=1, context_length=8, picture_size=16, picture_width=32, picture_layers=1, embedding=8
    )
    with pytest.raises(ValueError, match="microbatch: auto would change what is learned"):
        MicrobatchSearch(task, 8, FakeMemory())


# --- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_ranks_with_different_memory_agree(two_ranks, check):
    """One size, no deadlock, the gradients of one rank."""
    two_ranks(check)


# --- a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu():
    memory = DeviceMemory()
    held = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    memory.start()
    torch.empty(256 * MB, dtype=torch.uint8, device="cuda")
    reading = memory.read()
    assert reading.held >= 64 * MB and 256 * MB <= reading.growth < 300 * MB
    assert 256 * MB < reading.usable <= memory.total
    del held
    memory.start()
    assert memory.read().growth == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_search_on_a_gpu():
    """4 GB allowed, 64 MB a sample in each tensor that is kept: less than the batch of 48, and never more than 4 GB."""

    class Wide(Line):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(torch.ones(16 * MB))

        def forward(self, batch):
            wide = (batch["x"][:, :1].float() * self.wide).tanh()
            return {"total": super().forward(batch)["total"] + wide.square().mean()}

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(4_000 * MB / total)
    try:
        made, search, _ = run("gpu", task=Wide(), batch=48, duration="14ba", device="gpu", precision="fp32")
        assert search.settled and 4 <= search.size < 48
        assert made.state.device_train_microbatch_size == search.size
        assert torch.cuda.max_memory_reserved() <= 4_000 * MB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
