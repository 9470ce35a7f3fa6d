"""Every component a YAML may name: group -> name -> its builder, as "module:callable".

The builders are imported only when they are built; `recipes.config.schema` reads their keys from their source.
"""

COMPONENTS: dict[str, dict[str, str]] = {
    "model": {
        "latent_diffusion": "recipes.models.latent_diffusion.task:LatentDiffusion",
        "kl_autoencoder": "recipes.models.kl_autoencoder.task:KLAutoencoder",
        "dvae": "recipes.models.dvae.task:DiscreteAutoencoder",
        "contrastive_text": "recipes.models.contrastive.task:ContrastiveText",
        "autoregressive": "recipes.models.autoregressive.task:Autoregressive",
    },
    "denoiser": {
        "unet": "recipes.models.latent_diffusion.unet:unet",
    },
    "objective": {
        "ddpm": "recipes.models.latent_diffusion.ddpm:DDPM",
        "rectified_flow": "recipes.models.latent_diffusion.rectified_flow:RectifiedFlow",
    },
    "data": {
        "latents": "data.latents:latents",
        "tokens": "data.tokens:tokens",
        "pictures": "data.pictures:pictures",
    },
    "stream": {
        "local": "data.encoded_sets:local_set",
        "remote": "data.encoded_sets:remote_set",
    },
    "source": {
        "tars": "data.sources.tars:TarSource",
        "folder": "data.sources.folder:FolderSource",
        "parquet": "data.sources.parquet:ParquetSource",
        "mds": "data.sources.mds:MDSSource",
    },
    "filter": {
        "pictures": "data.sources.filters:Filter",
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
        "adam16": "recipes.engines.composer.builders:adam16",
        "adamw": "recipes.engines.composer.builders:adamw",
    },
    "schedule": {
        "constant": "recipes.engines.composer.builders:constant",
        "cosine": "recipes.engines.composer.builders:cosine",
        "linear": "recipes.engines.composer.builders:linear",
        "plateau": "callbacks.plateau:Plateau",
    },
    "algorithm": {
        "activation_checkpointing": "recipes.algorithms.modules.activation_checkpointing:ActivationCheckpointing",
        "attention": "recipes.algorithms.modules.attention:Attention",
        "channels_last": "recipes.algorithms.modules.channels_last:ChannelsLast",
        "compile": "recipes.algorithms.modules.compile:Compile",
        "fused_group_norm": "recipes.algorithms.modules.fused_group_norm:FusedGroupNorms",
        "low_precision_norms": "recipes.algorithms.modules.low_precision_norms:LowPrecisionNorms",
        "powersgd": "recipes.algorithms.powersgd.lever:PowerSGD",
        "resblock_grad_scaling": "recipes.algorithms.sixteen_bit.resblock_grad_scaling:ResblockGradScaling",
        "scheduled_ema": "recipes.algorithms.averaging.scheduled_ema:ScheduledEMA",
    },
    "callback": {
        "codebook": "callbacks.codebook:Codebook",
        "exponents": "callbacks.exponents:Exponents",
        "export": "callbacks.export:Export",
        "gradient_scales": "callbacks.gradient_scales:GradientScales",
        "lr_monitor": "recipes.engines.composer.builders:lr_monitor",
        "memory_monitor": "recipes.engines.composer.builders:memory_monitor",
        "progress": "callbacks.progress:Progress",
        "sample_grid": "callbacks.sample_grid:SampleGrid",
        "token_grid": "callbacks.token_grid:TokenGrid",
        "reconstructions": "callbacks.reconstructions:Reconstructions",
        "scheduled_value": "callbacks.scheduled_value:ScheduledValue",
        "throughput": "callbacks.throughput:Throughput",
        "unigram": "callbacks.unigram:Unigram",
    },
    "logger": {
        "tensorboard": "recipes.engines.composer.builders:tensorboard",
        "wandb": "recipes.engines.composer.builders:wandb",
        "mlflow": "recipes.engines.composer.builders:mlflow",
    },
}
