"""The starts of killed_runs.py, which test_killed.py looks at."""

STARTS = ["half 4", "unlinked 4", "{signal} 4", "export 7", "none 0"]
DIFFUSION = ["algorithms.noise={name: noise_of_samples}", "callbacks.export=null"]
ADAM16 = ["optimizer={name: adam16, lr: 2e-3, compiled: false}"]
TOKENS = [*ADAM16, "data.dropout=0.3"]  # the words of a caption are cut anew in each epoch, on any number of ranks
# Close below the scales that overflow in these runs on one rank, which begin between 19.5 and 20.
SCALED = [*ADAM16, "algorithms.scaling={name: resblock_grad_scaling, start: 19}"]
OVERFLOWS = (1, 5)  # batches done when gradients of the second block overflow: before the first kill, after the last
# Runs that are killed in batches 3 and 5 and go on from 2 and 4, each time with another number of ranks: what they
# train, engine, overrides, numbers of ranks.
WORLDS = {
    "tokens-composer": ("tokens", "composer", [*TOKENS, "training.fsdp={}"], [1, 2, 4]),
    "tokens-lightning": ("tokens", "lightning", [*TOKENS, "training.fsdp={checkpoints: full}"], [2, 1]),
    "scaled-composer": ("scaled", "composer", [*SCALED, "training.fsdp={}"], [1, 2, 4]),
    "scaled-lightning": ("scaled", "lightning", SCALED, [1, 2, 1]),
    "diffusion-composer": ("recipe", "composer", [*DIFFUSION, "training.fsdp={}"], [2, 1]),
    "diffusion-lightning": ("recipe", "lightning", DIFFUSION, [1, 2]),
}
# Starts of these runs in which the last rank's disk is full in the checkpoint of batch 4 instead: (run, number).
FULL = [("tokens-composer", 1)]
# What is trained -> which of these runs is also made on one rank, not sharded, and left alone.
ALONE = {"tokens": "tokens-composer", "scaled": "scaled-composer", "recipe": "diffusion-composer"}
SIGNALS = {"composer": "SIGTERM", "lightning": "SIGUSR1"}
