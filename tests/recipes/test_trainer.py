import torch
def test_resume(tmp_path, small_recipe, fit):
    losses=[]
    whole = fit(small_recipe(tmp_path / "whole", "checkpoints={every: 7ba, keep: -1, autoresume: false}"))
    print(sorted(p.name for p in (tmp_path/"whole"/"checkpoints").iterdir()))
    p=tmp_path/"whole"/"checkpoints"/"ep1-ba7-rank0.pt"
    part = fit(small_recipe(tmp_path / "part", f"checkpoints.load_path={p}"))
    d=max((a-b).abs().max().item() for a,b in zip(whole.state.model.parameters(), part.state.model.parameters()))
    print("DIFF",d, whole.state.total_loss_dict, part.state.total_loss_dict)
def test_exported(exported):
    recipe, trainer = exported
    import subprocess
    print(subprocess.run(["find", recipe.output], capture_output=True, text=True).stdout)
    print(trainer.state.eval_metric_values, sum(p.numel() for p in trainer.state.model.parameters()))
