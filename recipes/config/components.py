"""The table of components that a YAML may name: group -> name -> builder, as "module:callable".

A builder is imported only when its component is built. `recipes.config.schema` reads its keys from its source.
`recipes.config.entry_points` adds the components of other packages.
"""

COMPONENTS: dict[str, dict[str, str]] = {
    "model": {
        "latent_diffusion": "recipes.models.latent_diffusion.task:LatentDiffusion",
        "kl_autoencoder": "recipes.models.kl_autoencoder.task:KLAutoencoder",
        "dvae": "recipes.models.dvae.task:DiscreteAutoencoder",
        "contrastive_text": "recipes.models.contrastive.task:ContrastiveText",
        "autoregressive": "recipes.models.autoregressive.task:Autoregressive",
        "language": "recipes.models.language.task:Language",
    },
    "denoiser": {
        "unet": "recipes.models.latent_diffusion.unet:unet",
        "dit": "recipes.models.latent_diffusion.dit:DiT",
    },
    "objective": {
        "ddpm": "recipes.models.latent_diffusion.ddpm:DDPM",
        "rectified_flow": "recipes.models.latent_diffusion.rectified_flow:RectifiedFlow",
    },
    "data": {
        "latents": "data.latents:latents",
        "tokens": "data.tokens:tokens",
        "texts": "data.texts:texts",
        "pictures": "data.pictures:pictures",
    },
    "stream": {
        "local": "data.encoded.sets:local_set",
        "remote": "data.encoded.sets:remote_set",
    },
    "source": {
        "tars": "data.sources.tars:TarSource",
        "folder": "data.sources.folder:FolderSource",
        "parquet": "data.sources.parquet:ParquetSource",
        "mds": "data.sources.mds:MDSSource",
        "texts": "data.sources.texts:TextSource",
        "scored": "data.sources.scored:ScoredSource",
        "unshared": "data.sources.unshared:UnsharedSource",
    },
    "filter": {
        "pictures": "data.sources.filters:Filter",
        "dalle": "data.sources.dalle_filter:dalle",
    },
    "image_encoder": {
        "kl_vae": "recipes.encoders.vae:kl_vae",
        "dvae": "recipes.encoders.dvae:dvae",
    },
    "text_encoder": {
        "open_clip_text": "recipes.encoders.text:open_clip_text",
        "hf_clip_text": "recipes.encoders.text:hf_clip_text",
    },
    "optimizer": {
        "adam16": "recipes.algorithms.optimizers:adam16",
        "adamw": "recipes.algorithms.optimizers:adamw",
        "muon": "recipes.algorithms.optimizers:muon",
    },
    "schedule": {
        "constant": "recipes.training.schedules:constant",
        "cosine": "recipes.training.schedules:cosine",
        "linear": "recipes.training.schedules:linear",
        "plateau": "callbacks.plateau:Plateau",
    },
    "algorithm": {
        "activation_checkpointing": "recipes.algorithms.modules.activation_checkpointing:ActivationCheckpointing",
        "attention": "recipes.algorithms.modules.attention:AttentionImplementation",
        "block_all_reduce": "recipes.algorithms.gradients.block_all_reduce:BlockAllReduce",
        "channels_last": "recipes.algorithms.modules.channels_last:ChannelsLast",
        "compile": "recipes.algorithms.modules.compile:Compile",
        "cuda_graphs": "recipes.algorithms.graphs.cuda_graphs:CudaGraphs",
        "cudnn_benchmark": "recipes.algorithms.modules.cudnn_benchmark:CudnnBenchmark",
        "fp8": "recipes.algorithms.modules.fp8:Fp8",
        "fused_geglu": "recipes.algorithms.modules.fused_geglu:FusedGates",
        "fused_group_norm": "recipes.algorithms.modules.fused_group_norm:FusedGroupNorms",
        "lean_blocks": "recipes.algorithms.modules.lean_blocks:LeanBlocks",
        "low_precision_norms": "recipes.algorithms.modules.low_precision_norms:LowPrecisionNorms",
        "noise_of_samples": "recipes.algorithms.resilience.noise_of_samples:NoiseOfSamples",
        "powersgd": "recipes.algorithms.powersgd.lever:PowerSGD",
        "resblock_grad_scaling": "recipes.algorithms.sixteen_bit.resblock_grad_scaling:ResblockGradScaling",
        "scheduled_ema": "recipes.algorithms.averaging.scheduled_ema:ScheduledEMA",
        "working_weights": "recipes.algorithms.modules.working_weights:WorkingWeights",
    },
    "callback": {
        "codebook": "callbacks.codebook:Codebook",
        "exponents": "callbacks.exponents:Exponents",
        "export": "callbacks.export:Export",
        "fid": "callbacks.fid:Fid",
        "gradient_scales": "callbacks.gradient_scales:GradientScales",
        "lr_monitor": "callbacks.lr_monitor:LRMonitor",
        "memory_monitor": "callbacks.memory_monitor:MemoryMonitor",
        "progress": "callbacks.progress:Progress",
        "sample_grid": "callbacks.sample_grid:SampleGrid",
        "token_grid": "callbacks.token_grid:TokenGrid",
        "reconstructions": "callbacks.reconstructions:Reconstructions",
        "scheduled_value": "callbacks.scheduled_value:ScheduledValue",
        "throughput": "callbacks.throughput:Throughput",
        "unigram": "callbacks.unigram:Unigram",
    },
    "logger": {
        "tensorboard": "recipes.engines.logs.loggers:tensorboard",
        "wandb": "recipes.engines.logs.loggers:wandb",
        "mlflow": "recipes.engines.logs.loggers:mlflow",
    },
}

# The classes of which builders return an instance, group -> "module:class"; other groups have none of their own.
BASES = {
    "model": "recipes.models.task:Task",
    "denoiser": "recipes.models.latent_diffusion.denoiser:Denoiser",
    "objective": "recipes.models.latent_diffusion.objective:Objective",
    "data": "data.loading:Loading",
    "source": "data.sources.base:Source",
    "image_encoder": "recipes.encoders.base:ImageEncoder",
    "text_encoder": "recipes.encoders.base:TextEncoder",
    "optimizer": "torch.optim:Optimizer",
    "schedule": "collections.abc:Callable",
    "algorithm": "recipes.training.lever:Lever",
    "callback": "recipes.training.callback:Callback",
    "logger": "collections.abc:Callable",
}

# The groups whose objects have their name in recipes as an attribute `name`, by which exports record and open them.
NAMED = ("denoiser", "objective")
