"""The contrastive task against open_clip's loss, and its export as open_clip and the encode job open it."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data.loading import WEIGHT
from data.tokenizers.clip_library import open_clip
from recipes.encoders.text import open_clip_text
from recipes.engines.checkpoints.legacy import upgraded
from recipes.engines.metrics import figures_of
from recipes.models.contrastive.task import CONFIG, WEIGHTS, ContrastiveText, LogitScale
from recipes.models.kl_autoencoder.task import to_signed

SIZES = {"width": 16, "layers": 2, "heads": 2, "context_length": 12, "picture_size": 16, "patch_size": 8}
SIZES |= {"picture_width": 32, "picture_layers": 1, "embedding": 8}
CAPTIONS = ["red heart", "cat face", "a much longer caption of many words about a house by the sea", "", "flag: Japan"]


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(6)
    task = ContrastiveText(**SIZES).eval()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # new weights hardly tell captions apart
    return task


@pytest.fixture(scope="module")
def batch():
    tokens = open_clip.SimpleTokenizer(context_length=12)(CAPTIONS)
    images = torch.randint(256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {"image": images, "tokens": tokens}


@pytest.fixture(scope="module")
def folder(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "export"
    task.export(folder)
    return folder


def test_loss_is_that_of_open_clip(task, batch):
    with torch.no_grad():
        image = task.network.encode_image(to_signed(batch["image"]), normalize=True)
        text = task.network.encode_text(batch["tokens"], normalize=True)
        expected = open_clip.loss.ClipLoss()(image, text, task.logit_scale.log.exp())
    torch.testing.assert_close(task(batch)["total"].detach(), expected)
    figures = task.evaluate(batch)
    assert list(figures) == [*task.eval_names, "compared"] and all(value.shape == (5,) for value in figures.values())
    torch.testing.assert_close(figures["loss"].mean(), expected)
    assert figures["accuracy"].tolist() == ((image @ text.T).argmax(1) == torch.arange(5)).float().tolist()


def test_samples_without_weight_change_no_other(task, batch):
    alone = task.evaluate(batch)
    blank = {name: torch.zeros_like(tensor[:2]) for name, tensor in batch.items()}
    filled = {name: torch.cat([tensor, blank[name]]) for name, tensor in batch.items()}
    figures = task.evaluate(filled | {WEIGHT: torch.tensor([1.0] * 5 + [0.0] * 2)})
    for name, values in alone.items():
        torch.testing.assert_close(figures[name][:5], values)
        assert figures[name].isfinite().all()


def test_a_last_batch_of_one_sample_counts_nothing(task, batch):
    """It has no other to be compared with: its loss is 0 and its accuracy 1, however bad the model."""
    metrics = figures_of(task)
    last = {name: torch.cat([tensor[:1], torch.zeros_like(tensor[:1])]) for name, tensor in batch.items()}
    weights = torch.tensor([1.0, 0.0])  # the second one fills up the batch
    for part, samples in ((batch, None), ({name: tensor[:1] for name, tensor in batch.items()}, None), (last, weights)):
        results = task.evaluate(part if samples is None else part | {WEIGHT: samples})
        for metric in metrics.values():
            metric.update(results, samples)
    for name, metric in metrics.items():
        torch.testing.assert_close(metric.compute().float(), task.evaluate(batch)[name].mean())


def test_the_temperature_is_bounded(task, batch):
    """Radford et al. 2021, section 2.5: logits are never scaled by more than 100."""
    own = task.logit_scale.log.data.clone()
    task.logit_scale.log.data.fill_(20.0)
    try:
        assert task._similarities(batch).abs().max() <= 100.001
    finally:
        task.logit_scale.log.data.copy_(own)


@pytest.mark.parametrize(("start", "expected"), [(2.0, (1.0, -1.0)), (5.0, (1.0, 0.0))])
def test_the_largest_factor_can_become_smaller_again(start, expected):
    """A loss that rises with the factor lowers it; one that falls with it is not heard at the largest."""
    for sign, gradient in zip((1, -1), expected, strict=True):
        scale = LogitScale(torch.tensor(start))
        factor = scale()
        (sign * factor.log()).backward()
        assert scale.log.grad.item() == pytest.approx(gradient)
        assert factor.item() == pytest.approx(min(100, math.exp(start)), rel=1e-6)


def test_logits_are_32_bit_under_autocast(task, batch):
    """Both towers compute in bf16; from their embeddings on, everything is float32."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = task._similarities(batch)
        images = task.network.encode_image(to_signed(batch["image"]))
        captions = task.network.encode_text(batch["tokens"])
    assert images.dtype == captions.dtype == torch.bfloat16 and found.dtype == torch.float32
    images, captions = (nn.functional.normalize(side.detach().double(), dim=-1) for side in (images, captions))
    expected = task.logit_scale.log.detach().double().exp() * images @ captions.T
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)  # bf16 would be off by 0.03


def test_it_learns_to_tell_captions_apart(batch):
    torch.manual_seed(0)
    task = ContrastiveText(**SIZES)
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    first = task(batch)["total"].item()
    for _ in range(40):
        optimizer.zero_grad()
        loss = task(batch)["total"]
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 3 and task.eval().evaluate(batch)["accuracy"].mean() == 1


def test_open_clip_opens_the_export(task, batch, folder):
    clip = open_clip.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        own = dict(task.network.named_parameters()) | {"logit_scale": task.logit_scale.log.reshape(())}
        assert clip.state_dict()["logit_scale"].shape == ()  # as published
        for name, theirs in clip.named_parameters():
            assert torch.equal(theirs, own[name]), name
        assert (clip.encode_text(batch["tokens"]) == task.network.encode_text(batch["tokens"])).all()
        x = to_signed(batch["image"])
        assert (clip.encode_image(x) == task.network.encode_image(x)).all()
    # Images that others normalise as the file says are those that it was trained on.
    mean, std = (torch.tensor(clip.visual.preprocess_cfg[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close((batch["image"] / 255 - mean) / std, x)


def test_the_export_has_the_factor_of_training(batch, tmp_path):
    """The step of an optimizer may lead beyond the bound, which open_clip's model does not have."""
    task = ContrastiveText(**SIZES)
    task.logit_scale.log.data.fill_(5.0)
    task.export(tmp_path)
    clip = open_clip.create_model(f"local-dir:{tmp_path}")
    assert clip.logit_scale.exp().item() == task.logit_scale().item()


def test_the_encode_job_opens_the_export(task, batch, folder):
    vectors = []
    hook = task.network.ln_final.register_forward_hook(lambda module, args, out: vectors.append(out))
    with torch.no_grad():
        task.network.encode_text(batch["tokens"])
    hook.remove()
    encoder = open_clip_text(path=str(folder), layer="last", precision="fp32")
    assert (encoder.tokenize(CAPTIONS) == batch["tokens"]).all()
    assert (encoder.length, encoder.width) == (12, 16)
    torch.testing.assert_close(encoder.encode(CAPTIONS), vectors[0], rtol=1e-5, atol=1e-6)
    penultimate = open_clip_text(path=str(folder), precision="fp32").encode(CAPTIONS)
    assert (penultimate - vectors[0]).abs().max() > 0.01


def test_weights_come_back_strictly(task, batch, folder):
    other = ContrastiveText(**SIZES).eval()
    other.load_export(folder)
    assert (other.evaluate(batch)["loss"] == task.evaluate(batch)["loss"]).all()
    with pytest.raises(ValueError, match="does not fit the model"):
        ContrastiveText(**(SIZES | {"width": 32})).load_export(folder)


@pytest.mark.parametrize("shape", [None, (1,), (2,)])
def test_the_scale_of_a_file_of_open_clip(task, folder, tmp_path, shape):
    """A scalar, or a vector of one (`nonscalar_logit_scale`); nothing else."""
    (tmp_path / CONFIG).symlink_to(folder / CONFIG)
    tensors = load_file(folder / WEIGHTS)
    assert tensors["logit_scale"].shape == ()
    scale = tensors.pop("logit_scale")
    save_file(tensors | ({} if shape is None else {"logit_scale": scale.expand(shape).clone()}), tmp_path / WEIGHTS)
    other = ContrastiveText(**SIZES)
    if shape == (1,):
        other.load_export(tmp_path)
        assert torch.equal(other.logit_scale.log, task.logit_scale.log)
    else:
        with pytest.raises(ValueError, match="does not fit the model: .*logit_scale"):
            other.load_export(tmp_path)


def test_a_checkpoint_of_an_earlier_version(task):
    """Its scale was a scalar of open_clip's network."""
    old = {"weights": {"network.logit_scale": torch.tensor(2.0)}, "names": ["task.network.logit_scale"]}
    state = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5)}
    new = upgraded(old | {"optimizer": {"state": {"task.network.logit_scale": state}}})
    assert new["names"] == ["task.logit_scale.log"] and "logit_scale.log" in task.state_dict()
    assert torch.equal(new["weights"]["logit_scale.log"], torch.tensor([2.0]))
    (moments,) = new["optimizer"]["state"].values()
    assert torch.equal(moments["exp_avg"], torch.tensor([0.5])) and torch.equal(moments["step"], torch.tensor(3.0))


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("text_cfg", {"heads": 4}, "heads is 4, the recipe's network has 2"),
        ("vision_cfg", {"head_width": 16}, "head_width is 16, the recipe's network has 32"),
        ("vision_cfg", {"head_width": None}, "head_width is 64, the recipe's network has 32"),  # open_clip's default
        (None, {"quick_gelu": True}, "quick_gelu is True, the recipe's network has False"),  # OpenAI's weights
    ],
)
def test_weights_that_differ_in_no_shape(folder, tmp_path, part, values, message):
    config = json.loads((folder / "open_clip_config.json").read_text())
    place = config["model_cfg"] if part is None else config["model_cfg"][part]
    place |= values
    for name in [name for name, value in values.items() if value is None]:
        del place[name]
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "open_clip_model.safetensors").symlink_to(folder / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match=f"open_clip_config.json: {message}"):
        ContrastiveText(**SIZES).load_export(tmp_path)


@pytest.mark.parametrize(
    ("model", "part"),
    [([], "model_cfg"), ("", "model_cfg"), ({"vision_cfg": None}, "vision_cfg"), ({"vision_cfg": 3}, "vision_cfg")],
)
def test_a_config_with_values_of_other_types(folder, tmp_path, model, part):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": model}))
    with pytest.raises(ValueError, match=f"open_clip_config.json: no object `{part}`"):
        ContrastiveText(**(SIZES)).load_export(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 0}, "heads: 0; give 1 or more"),
        ({"picture_layers": 0}, "picture_layers: 0; give 1 or more"),
        ({"context_length": 2}, "context_length: 2; give 3 or more"),  # no token between the marks
        ({"picture_size": 7}, "picture_size: 7; give 8 or more"),  # less than a patch
        ({"heads": 3}, "width 16 must be a multiple of heads \\(3\\), picture_width 32 of 32, and"),
        ({"picture_width": 48}, "width 16 must be a multiple of heads \\(2\\), picture_width 48 of 32, and"),
        ({"patch_size": 5}, "width 16 must be .*, and picture_size 16 of patch_size \\(5\\)"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=f"^contrastive_text: {message}"):
        ContrastiveText(**SIZES | sizes)


def test_what_images_and_captions_must_have(task):
    wanted = {"picture_size": 16, "context_length": 12, "caption_vocabulary": 49408}
    assert task.requirements() == wanted
