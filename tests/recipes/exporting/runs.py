"""Runs as an engine leaves them, without training."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from recipes.config.build import build
from recipes.config.recipe import to_yaml
from recipes.engines.checkpoints.conversion import to_composer
from recipes.engines.lightning.checkpoint_format import FORMAT
from recipes.training.checkpoint_names import KINDS, REST


def a_run(recipe, engine="lightning", sharded=False, average=True, earlier=None):
    """A run's folder with a checkpoint of new weights, as an engine writes it, and without training. The averaged
    weights are half of the others. `earlier` makes of the state what an earlier version would have written."""
    torch.manual_seed(3)
    task = build(recipe.model)
    weights = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trained = {name for name, p in task.named_parameters() if p.requires_grad}
    moments = {name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(weights[name])} for name in trained}
    averages = {"begun": 3, "average": {name: weights[name] / 2 for name in trained}} if average else {}
    generators = {"python": (3, (1, 2), None), "numpy": ("MT19937", torch.arange(4), 0, 0, 0.0), "torch": torch.ones(3)}
    state = {
        "format": FORMAT,
        "counts": {"batch": 5, "sample": 40, "epoch": 1, "batch_in_epoch": 0, "sample_in_epoch": 0},
        "weights": weights,
        "optimizer_name": "AdamW",
        "optimizer": {"state": moments, "param_groups": [{"params": sorted(trained), "lr": 0.1, "initial_lr": 0.2}]},
        "scaler": {},
        "data": {"epoch": 1},
        "levers": {"ScheduledEMA": averages, "ClipByNorm": {}},
        "callbacks": {},
        "generators": [generators],
    }
    levers = {}
    if earlier is not None:
        state = earlier(state)
    elif sharded:
        levers = {"ScheduledEMA": {"average": averages.pop("average")}} if average else {}
    folder = Path(recipe.output, "checkpoints")
    folder.mkdir(parents=True)
    Path(recipe.output, "config.yaml").write_text(to_yaml(recipe))
    if engine == "composer":
        state = to_composer(state)
    path = folder / ("ep1-ba5" if sharded else "ep1-ba5-rank0.pt" if engine == "composer" else "ep1-ba5.ckpt")
    if not sharded:
        torch.save(state, path)
    elif engine == "composer":
        dcp.save(state | {"levers": levers}, checkpoint_id=path)
    else:
        parts = {name: state.pop(name) for name in ("weights", "optimizer")}
        dcp.save(parts | {"levers": levers}, checkpoint_id=path)
        torch.save(state, path / REST)
    (folder / KINDS[engine].link).symlink_to(path.name)
    return path, task
