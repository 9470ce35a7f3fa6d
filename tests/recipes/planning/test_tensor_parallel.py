"""What cannot be divided is said in a line before anything is built, and what is sent is that of the formulas."""

from pathlib import Path

import pytest

from data.cost import size_text
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.devices import Devices
from recipes.planning.dry_run import describe_run
from recipes.planning.tensor_parallel import check_tensor_parallel, held, messages

ROOT = Path(__file__).resolve().parents[3]


def recipe(name, *overrides):
    return load_config(ROOT / "yamls" / f"{name}.yaml", list(overrides), Recipe, [])


def refusal(name, *overrides, world):
    config = recipe(name, *overrides)
    with pytest.raises(ValueError) as caught:
        check_tensor_parallel(config, Devices.of(config.training, world, min(world, 8)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


TWO, EIGHT = "training.tensor_parallel=2", "training.tensor_parallel=8"
WEIGHTS = "algorithms={powersgd: null, resblock_grad_scaling: {weights: fp16}}"


@pytest.mark.parametrize(
    ("name", "overrides", "world", "message"),
    [
        ("dalle_12b", ["training.tensor_parallel=3"], 8, "3 does not divide 8 devices"),
        ("dalle_12b", ["training.tensor_parallel=16"], 32, "groups of 16 devices do not fit into machines of 8"),
        ("dalle_12b", [EIGHT], 8, "8 does not divide the model's heads, 62; give 2, 31, 62, or 1"),
        ("dalle_1b", [TWO], 8, "leaves 4 groups of devices, between which only FSDP averages gradients; set"),
        (
            "dalle_1b",
            [EIGHT, "algorithms.fp8={name: fp8}"],
            8,
            "8 does not work with fp8, because it multiplies whole matrices; remove one of them (algorithms.fp8=null)",
        ),
        ("dalle_12b", [TWO, WEIGHTS], 8, "2 does not work with weights: fp16 of algorithms.resblock_grad_scaling"),
        ("gpt2_8b", ["training.precision=amp_fp16"], 8, "8 does not work with training.precision: amp_fp16, under"),
        ("gpt2_8b", ["training.tensor_parallel=64"], 64, "groups of 64 devices do not fit into machines of 8"),
        ("gpt2_4b", ["model.vocabulary=50257", "training.tensor_parallel=8"], 8, "the model's vocabulary, 50257"),
        (
            "gpt2_8b",
            ["model.positions=1023", "training.sequence_parallel=true"],
            8,
            "training.sequence_parallel: 8 devices do not divide 1023 positions; give",
        ),
        ("sd2_base", [TWO], 2, "latent_diffusion does not say how its matrices can be divided; give 1"),
        ("openmoji_diffusion", [EIGHT], 8, "8 does not divide the model's heads, 4; give 2, 4, or 1"),
        (
            "openmoji_diffusion",
            [TWO, "training.sequence_parallel=true"],
            2,
            "training.sequence_parallel: the model does not say how its residual stream can be divided; give",
        ),
        ("dalle_12b", [TWO, "model={width: 60, heads: 2}"], 8, "times 4 shards do not divide a matrix of 60 rows"),
        ("dalle_12b", [TWO, "training.fsdp.replicas=3"], 8, "3 does not divide 8 devices in groups of 2"),
    ],
)
def test_what_cannot_be_divided(name, overrides, world, message):
    assert message in refusal(name, *overrides, world=world)


def test_groups_may_be_spread_over_machines_if_the_recipe_says_so():
    config = recipe("dalle_12b", "training={tensor_parallel: 2, tensor_between_machines: true, fsdp: {replicas: 1}}")
    devices = Devices.of(config.training, 8, 1)
    assert (devices.tensor, devices.shards, devices.replicas) == (2, 4, 1)
    check_tensor_parallel(config, devices)


def test_the_batch_is_divided_over_groups():
    training = recipe("dalle_12b", "training.tensor_parallel=2").training
    assert (training.groups(64, 8), training.device_batch(64)) == (32, 32)
    training.global_batch = 1000
    with pytest.raises(ValueError, match="1000 does not divide over 32 groups of 2 devices"):
        training.device_batch(64)


def test_the_dry_run(monkeypatch):
    """DALL-E's largest transformer on two machines: what each device holds and sends."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = recipe("dalle_12b", "training.tensor_parallel=2")
    lines = describe_run(config, []).splitlines()
    task, devices = build_on_meta(config.model), Devices.of(config.training, 16, 8)
    parameters, own = sum(p.numel() for p in task.parameters()), held(task, task, devices)
    assert (devices.replicas, devices.shards, devices.tensor) == (2, 4, 2)
    assert lines[0] == f"model: autoregressive, {parameters:,} parameters, {parameters:,} of them trained"
    # Not divided: token, padding, row, column and position embeddings, the norms, and the biases of `out` and `down`.
    whole = 3968 * (16384 + 8192 + 2 * 256 + 2 * 32 + 2 + 64 * (4 + 2))
    assert own == (parameters - whole) / 2 + whole
    assert "matrices divided over 2 devices, 1/4 of that, and" in lines[1]
    assert "over 16 devices (WORLD_SIZE), 128 on each, in 32 microbatches of 4" in "".join(lines)
    branches, losses, hidden = messages(task.tensor_plan(), 4, 2)
    values = 4 * 1280 * 3968
    assert (branches.kind, branches.count, branches.values) == ("all_reduce", 256, values)
    assert (losses.kind, losses.count, losses.values) == ("all_gather", 1, 2 * 2 * 4 * 1279)
    assert (hidden.kind, hidden.count, hidden.values) == ("all_reduce", 1, 4 * 1279 * 3968)
    (line,) = [line for line in lines if line.startswith("within 2 tensor parallel devices")]
    assert f"256 all-reduces of {size_text(2 * values)} per microbatch" in line  # fp16 in the blocks
    # A ring of two sends as many bytes as a message has; 32 bits between blocks and loss.
    rows = 128 * 1279
    sent = 32 * 256 * 2 * values + 2 * 4 * rows + 4 * rows * 3968
    assert f"each sends {size_text(sent)} per step" in line
    # PowerSGD averages parts between machines: of rank 896 over 8 devices, as without tensor parallelism.
    (line,) = [line for line in lines if line.startswith("between 2 replicas")]
    assert "MB for the blocks' matrices" in line or "GB for the blocks' matrices" in line


def test_the_dry_run_of_a_divided_sequence(monkeypatch):
    """Megatron-LM's largest model on 512 devices: 64 groups of 8, each with a batch of 8."""
    monkeypatch.setenv("WORLD_SIZE", "512")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = recipe("gpt2_8b", "training.sequence_parallel=true", "training.precision=amp_bf16")
    lines = describe_run(config, []).splitlines()
    assert lines[0] == "model: language, 8,317,040,640 parameters, 8,317,040,640 of them trained"
    (line,) = [line for line in lines if line.startswith("within 8 tensor parallel devices")]
    stream, branches = 8 * 1024 * 3072, 144
    assert f"{3 * branches} all-gathers and {2 * branches} reduce-scatters of {size_text(2 * stream)}" in line
    # 16 bits in branches and where tokens are predicted; 32 bits in the all-reduce of the divided table and where the
    # stream begins; two numbers per token; gradients of gains and biases.
    values = 2 * stream * (5 * branches + 2) + 4 * stream * (2 + 1) + 4 * 8 * 2 * 8 * 1024
    values += 2 * 4 * 3072 * (2 * (branches + 1) + branches)
    assert f"each sends {size_text(7 / 8 * values)} per step" in line


def test_the_dry_run_of_a_diffusion_transformer(monkeypatch):
    """Numbers of patches and of text positions are those of the data; blocks that are computed again send again."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    network = "model.denoiser={cross_attention: true, text_layers: 1}"
    again = "algorithms.again={name: activation_checkpointing, every: 2}"
    nothing = "data.streams.train.path=runs/nothing"  # a set that lies here would have sizes of its own
    config = recipe("openmoji_diffusion", TWO, network, again, nothing, "training={microbatch: 16, precision: fp32}")
    lines = describe_run(config, []).splitlines()
    (line,) = [line for line in lines if line.startswith("within 2 tensor parallel devices")]
    # 8 layers of three branches, of which every second one is computed again, and the text's block of two branches.
    patches, text = 2 * 24 + 3 * 4, 2 * 2 + 1
    sizes = [4 * 16 * positions * 256 for positions in (2 * 2, 77)]
    assert f"{text} all-reduces of {size_text(sizes[1])}" in line
    assert f"{patches} all-reduces of {size_text(sizes[0])}" in line and "in 26 branches" in line
    # In four microbatches; the text's gradient is sent once for all layers.
    assert f"each sends {size_text(4 * (patches * sizes[0] + (text + 1) * sizes[1]))} per step" in line


def test_a_sequence_is_divided_by_tensor_parallel_devices_only():
    with pytest.raises(ValueError, match="training.sequence_parallel: true without tensor_parallel above 1"):
        recipe("gpt2_1b", "training.sequence_parallel=true")
