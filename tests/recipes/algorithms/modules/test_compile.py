"""Compiled networks train as others do, are used for training alone, and leave checkpoints as they are."""

import copy
import json
from pathlib import Path

import pytest
import torch
from composer import DataSpec, Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.algorithms.modules import compile as compile_module
from recipes.algorithms.modules.activation_checkpointing import ActivationCheckpointing
from recipes.algorithms.modules.channels_last import use_channels_last
from recipes.algorithms.modules.compile import (
    Compile,
    CompiledForward,
    allow_compilations,
    compile_forwards,
    inductor_options,
    why_no_compiler,
)
from recipes.algorithms.sharding.shard import Unit, shard, units_of
from recipes.engines.composer.model import ComposerTask
from recipes.models.contrastive.task import ContrastiveText
from recipes.models.dvae.task import DiscreteAutoencoder
from recipes.models.kl_autoencoder.task import KLAutoencoder
from recipes.models.latent_diffusion.unet import unet
from recipes.models.task import Task
from recipes.training.microbatches import samples_of, split
from tests.recipes.algorithms.composer_levers import algorithms_of
from tests.recipes.engines.composer.inside import lever_of
from tests.recipes.training.fake_run import FakeRun
from tests.stub_gpu import needs_stub_gpu


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.two(nn.functional.gelu(self.one(x)))


class NormedBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return super().forward(self.norm(x))


class Deep(Task):
    """A task of three blocks."""

    eval_names = ["loss"]

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(width) for _ in range(3)))

    def blocks(self):
        return list(self.net)

    def forward(self, batch):
        return {"total": (self.net(batch["x"]) - batch["y"]).square().mean()}

    def evaluate(self, batch):
        return {"loss": (self.net(batch["x"]) - batch["y"]).square().mean(1)}


def train(*levers, task=None, device="cpu", microbatch=4, **options):
    """A finished run with levers, always on the same batches: trainer and task."""
    task = task or Deep()
    for lever in levers:
        lever.task = task
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"x": row, "y": row.roll(1)} for row in x], batch_size=8)
    data = DataSpec(loader, split_batch=split, get_num_samples_in_batch=samples_of)
    made = Trainer(
        model=ComposerTask(task),
        train_dataloader=data,
        eval_dataloader=loader,
        max_duration="8ba",
        optimizers=torch.optim.AdamW(task.parameters(), lr=0.01),
        algorithms=algorithms_of(levers, task),
        device=device,
        device_train_microbatch_size=microbatch,
        progress_bar=False,
        **options,
    )
    # On a GPU, Composer has allowed it, and compiled code may take it for other products than PyTorch does.
    torch.backends.cuda.matmul.allow_tf32 = False
    made.fit()
    made.close()
    return made, task


def weights(task):
    return torch.cat([p.detach().flatten() for p in task.parameters()]).cpu()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("whole", [False, True])
def test_training_is_the_same(whole, capsys):
    compiled = Compile(None, backend="aot_eager", whole=whole)
    made, task = train(compiled)
    assert [f.called for f in compiled.forwards] == [True] * (1 if whole else 3)
    _, plain = train()
    torch.testing.assert_close(weights(task), weights(plain), rtol=1e-5, atol=1e-6)
    kind = "1 networks" if whole else "3 blocks"
    assert f"compile: {kind}, mode default, in the first batch" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(why_no_compiler(on_gpu=False) is not None, reason="no C++ compiler")
def test_inductor_trains_the_same():
    """A block of two kernels: the C++ compiler takes seconds for each."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return x + nn.functional.gelu(self.one(x))

    task, plain = Deep(), Deep()
    task.net[0] = Small()
    plain.net[0] = copy.deepcopy(task.net[0])
    (forward, *_) = compile_forwards(task.blocks()[:1], {"backend": "inductor", "mode": "default", "dynamic": False})
    batch = {"x": torch.randn(8, 6), "y": torch.randn(8, 6)}
    for model in (task, plain):
        model(batch)["total"].backward()
    assert forward.called
    for one, other in zip(task.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)  # fused sums in another order


def test_validation_and_sampling_run_without():
    task = Deep()
    forwards = compile_forwards(task.blocks(), {"backend": "aot_eager"})
    x = {"x": torch.randn(5, 6), "y": torch.randn(5, 6)}
    with torch.no_grad():
        task(x)
    task.eval()
    task(x)
    task.train()
    forwards[0].paused = True
    task(x)
    assert [forward.called for forward in forwards] == [False, True, True]


def test_running_out_of_compilations_is_an_error():
    """PyTorch's default is to run the rest uncompiled, with a warning."""
    task = Deep()
    compile_forwards(task.blocks(), {"backend": "eager", "dynamic": False})
    with torch._dynamo.config.patch(recompile_limit=2):  # the first block's input needs no gradient, the others' do
        task({"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            task({"x": torch.randn(5, 6), "y": torch.randn(5, 6)})


def test_limits_leave_room_and_are_never_lowered():
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        allow_compilations(512)
        allow_compilations(4)
        config = torch._dynamo.config
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (512, 512)
        assert config.fail_on_recompile_limit_hit


def test_a_graph_that_breaks_is_an_error_if_asked_for():
    class Broken(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    for fullgraph in (False, True):
        torch._dynamo.reset()
        task = Deep()
        task.net[1].__class__ = Broken
        lever = Compile(task, backend="aot_eager", fullgraph=fullgraph)
        lever.compile(FakeRun(task))
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                task({"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
        else:
            task({"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
            assert all(forward.called for forward in lever.forwards)


def test_names_and_copies():
    task, plain = Deep(), Deep()
    compile_forwards(task.blocks(), {"backend": "aot_eager"})
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    task(batch)["total"].backward()
    assert list(task.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(task)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other.blocks()[0].forward.module is other.blocks()[0]
    assert torch.equal(other(batch)["total"], (batch["x"] - batch["y"]).square().mean())


def test_checkpoints_resume_with_and_without(tmp_path):
    options = {"save_interval": "1ba", "save_filename": "ba{batch}.pt"}
    _, whole = train(Compile(None, backend="aot_eager"), save_folder=str(tmp_path), **options)
    state = torch.load(tmp_path / "ba4.pt", weights_only=False)["state"]["model"]
    assert not [name for name in state if "_orig_mod" in name or "compile" in name]
    for levers in ([Compile(None, backend="aot_eager")], []):
        _, task = train(*levers, load_path=str(tmp_path / "ba4.pt"))
        torch.testing.assert_close(weights(task), weights(whole), rtol=1e-5, atol=1e-6)


def test_with_a_scheduled_average():
    runs = []
    for levers in ([Compile(None, backend="aot_eager")], []):
        ema = ScheduledEMA(decay=0.5, start="2ba")
        made, _ = train(*levers, ema)
        average = torch.cat([t.flatten() for t in ema.average.shadow])
        runs.append((average, float(made.state.eval_metric_values["loss"])))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-5, atol=1e-6)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)


def test_with_activations_that_are_computed_again():
    _, both = train(ActivationCheckpointing(None), Compile(None, backend="aot_eager"))
    _, plain = train()
    torch.testing.assert_close(weights(both), weights(plain), rtol=1e-5, atol=1e-6)


class Repeated(Deep):
    """Calls one block three times, and names it as often."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[self.net[0]] * 3)


def test_a_block_that_is_named_several_times_is_compiled_once():
    compiled = Compile(None, backend="aot_eager")
    _, task = train(compiled, task=Repeated())
    _, plain = train(task=Repeated())
    assert len(compiled.forwards) == 1
    torch.testing.assert_close(weights(task), weights(plain), rtol=1e-5, atol=1e-6)


def test_room_for_each_block_in_two_sizes():
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_forwards([nn.Linear(2, 2) for _ in range(20)], {})
        assert torch._dynamo.config.recompile_limit == 80
        compile_forwards([nn.Linear(2, 2)], {})
        assert torch._dynamo.config.recompile_limit == 80


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="compile: nothing to compile, the model names no blocks; set whole: true"):
        compile_forwards([], {})
    task = Deep()
    compile_forwards(task.blocks(), {})
    with pytest.raises(ValueError, match="compiled already"):
        compile_forwards(task.blocks(), {})

    class Elsewhere(Deep):
        """Calls a part of its network, as autoencoders call encode and decode."""

        def forward(self, batch):
            return {"total": (self.net[0](batch["x"]) - batch["y"]).square().mean()}

    with pytest.raises(ValueError, match="Sequential ran without being called through its forward.* whole: false"):
        train(Compile(None, backend="aot_eager", whole=True), task=Elsewhere())
    monkeypatch.setattr(compile_module, "has_triton", lambda: False)
    assert "Triton" in why_no_compiler(on_gpu=True)
    monkeypatch.setattr(compile_module, "why_no_compiler", lambda on_gpu: "no C++ compiler")
    with pytest.raises(ValueError, match="compile: no C\\+\\+ compiler; or remove the lever"):
        train(Compile(None))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiscreteAutoencoder(codes=8, hidden=8, blocks=1, initial=4),
        lambda: KLAutoencoder(channels=[8, 8], norm_groups=4),
        lambda: ContrastiveText(
            width=16, layers=1, heads=2, context_length=8, picture_size=16, patch_size=8, picture_width=32,
            picture_layers=1, embedding=8,
        ),
    ],
    ids=["dvae", "kl_autoencoder", "contrastive_text"],
)  # fmt: skip
def test_networks_that_are_called_in_parts(make):
    """Encoders, decoders and towers are compiled as a whole where the network around them has methods of its own."""
    task = make()
    lever = Compile(task, backend="eager", whole=True)
    lever.compile(FakeRun(task))
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    task({"image": images, "tokens": torch.ones(2, 8, dtype=torch.int64)})["total"].backward()
    lever.check()
    assert len(lever.forwards) == 2


def test_one_graph_around_units_of_fsdp_is_refused():
    """Dynamo cannot trace their hooks."""
    task = Deep()
    block, layer = Unit([task.net[0]], torch.bfloat16), Unit([task.net[0].one], None)
    with pytest.raises(ValueError, match="fullgraph: true, and training.fsdp gathers Linear inside of a compiled"):
        Compile(task, backend="eager", fullgraph=True).check_units([layer, block])
    Compile(task, backend="eager", fullgraph=True).check_units([block])
    Compile(task, backend="eager").check_units([layer, block])


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_are_one_graph_each_under_ddp(one_rank, whole):
    """Whole networks are divided, so that their gradients are averaged during the backward pass."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    task = Deep(width=400)  # its weights do not fit in the first bucket of DDP
    with torch._dynamo.config.patch(optimize_ddp=True):
        Compile(task, backend="aot_eager", whole=whole).compile(FakeRun(task))
        DistributedDataParallel(task)({"x": torch.randn(2, 400), "y": torch.randn(2, 400)})["total"].backward()
    # One graph of the first block and one of the others, whose inputs have gradients; or two parts of the network.
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == 2


@pytest.mark.parametrize("full_shard", [False, True])
def test_blocks_with_norms_are_one_graph_each_under_fsdp(one_rank, full_shard):
    """Norms are gathered in another format than the rest of a block, but without hooks inside of it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    task, low = Deep(), torch.bfloat16
    task.net = nn.Sequential(*(NormedBlock(6) for _ in range(3)))
    lever = Compile(task, backend="aot_eager", fullgraph=True)
    lever.check_units(units_of(task, parameters=low))
    shard(task, init_device_mesh("cpu", (1,)), parameters=low, reshard_after_forward=full_shard)
    lever.compile(FakeRun(task))
    for _ in range(2):
        with torch.autocast("cpu", low):
            loss = task({"x": torch.randn(2, 6), "y": torch.randn(2, 6)})["total"]
        loss.backward()
    assert all(parameter.grad is not None for parameter in task.parameters())
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == 2  # of the first block and of the others


@needs_stub_gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_graphs_are_launched_in_place_of_kernels(stub_gpu):
    done = stub_gpu(Path(__file__).with_name("graphs_on_stub_gpu.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("row:")]
    found = {(microbatch, levers): (launches, kept) for microbatch, levers, launches, kept, _ in rows}
    assert len(found) == 8
    for microbatch in (8, 2):
        for levers in ("compile", "cuda_graphs", "both"):
            assert 0 < found[microbatch, levers][0] < 0.6 * found[microbatch, "none"][0]
            # Gradients of 12 parameters are kept where a second microbatch follows.
            assert found[microbatch, levers][1] == (0 if microbatch == 8 else 12)
        # One launch per pass of each of three blocks, and what copies the input and computes the loss.
        assert found[microbatch, "both"][0] == found[microbatch, "cuda_graphs"][0]
    assert {strays for *_, strays in rows} == {0}
    assert "searched: [true, 3]" in done.stdout


def test_a_recipe_compiles_its_unet(small_recipe, fit, tmp_path):
    changes = ["training.duration=1ba", "checkpoints.save=false", "training.global_batch=2"]
    changes += ["model.denoiser." + key for key in ("channels=[32,64]", "attention=[true,false]", "heads=[1,2]")]
    trainer = fit(small_recipe(tmp_path, *changes, "algorithms.compile={name: compile, backend: aot_eager}"))
    forwards = lever_of(trainer, Compile).forwards
    assert len(forwards) == 5 and all(f.called for f in forwards)
    assert all(isinstance(block.forward, CompiledForward) for block in trainer.state.model.task.blocks())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_images_in_channels_last_are_not_laid_out_again(mode):
    """The compiler's options are those of the mode, but for this one."""
    plain, changed = (
        torch._TorchCompileInductorWrapper(**{"mode": None, "options": None, "dynamic": False, **options}).config
        for options in (inductor_options(mode, channels_last=False), inductor_options(mode, channels_last=True))
    )
    assert changed == {**plain, "layout_optimization": False} != plain


def test_the_lever_knows_the_format_of_images(monkeypatch):
    """Whatever has happened to the weights, which FSDP keeps in another format."""
    asked = []
    monkeypatch.setattr(compile_module, "why_no_compiler", lambda on_gpu: None)
    monkeypatch.setattr(compile_module, "inductor_options", lambda _, channels_last: asked.append(channels_last) or {})
    for change in (lambda network: None, use_channels_last):
        network = unet(channels=[32, 64], attention=[True, False], heads=[1, 2], text_width=16)
        change(network)
        network.to(memory_format=torch.contiguous_format)
        Compile(network).compile(FakeRun(network))
    assert asked == [False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("names", ["default", "reduce-overhead", "cuda_graphs", "default cuda_graphs"])
@pytest.mark.parametrize("microbatch", [8, 4, 3])
def test_on_a_gpu(names, microbatch):
    """Fused kernels and CUDA graphs, with gradients summed over microbatches and an average put in for validation."""
    runs = []
    for used in (names.split(), []):
        torch._dynamo.reset()
        task = Deep()
        levers = [CudaGraphs(task) if name == "cuda_graphs" else Compile(task, mode=name) for name in used]
        levers.append(ScheduledEMA(decay=0.5, start="2ba"))
        options = {"device": "gpu", "microbatch": microbatch, "precision": "fp32", "eval_interval": "2ba"}
        made, task = train(*levers, task=task, **options)
        runs.append((weights(task), made.state.eval_metric_values["loss"]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-4, atol=1e-5)
    assert float(runs[0][1]) == pytest.approx(float(runs[1][1]), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lever", ["compile", "compile, mode: reduce-overhead", "cuda_graphs"])
def test_a_recipe_on_a_gpu(small_recipe, fit, tmp_path, lever):
    changes = ["training.device=gpu", "training.duration=6ba", "training.microbatch=4", "checkpoints.save=false"]
    trainer = fit(small_recipe(tmp_path, *changes, f"algorithms.x={{name: {lever}}}"))
    assert trainer.state.timestamp.batch.value == 6


@pytest.mark.parametrize(
    ("mode", "on_gpu", "kept"),
    [("reduce-overhead", True, True), ("reduce-overhead", False, False), ("default", True, False)],
)
def test_gradients_have_memory_of_their_own_for_graphs_alone(mode, on_gpu, kept):
    task = Deep()
    lever = Compile(task, backend="aot_eager", mode=mode)
    run = FakeRun(task)
    run.device = torch.device("cuda" if on_gpu else "cpu")  # by which levers decide; tensors stay on the CPU
    lever.compile(run)
    task({"x": torch.randn(4, 6), "y": torch.randn(4, 6)})["total"].backward()
    lever.before_forward(run)
    assert bool(lever.gradients.copies) == kept
