"""Every component a YAML may name: group -> name -> its builder, as "module:callable".

The builders are imported only when they are built; `recipes.schema` reads their keys from their source.
"""

COMPONENTS: dict[str, dict[str, str]] = {
    "model": {
        "latent_diffusion": "recipes.models.latent_diffusion:LatentDiffusion",
        "kl_autoencoder": "recipes.models.autoencoder:KLAutoencoder",
        "dvae": "recipes.models.discrete_autoencoder:DiscreteAutoencoder",
        "contrastive_text": "recipes.models.contrastive:ContrastiveText",
        "autoregressive": "recipes.models.autoregressive:Autoregressive",
    },
    "denoiser": {
        "unet": "recipes.models.unet:unet",
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
        "kl_vae": "precompute.encoders.vae:kl_vae",
        "dvae": "precompute.encoders.dvae:dvae",
    },
    "text_encoder": {
        "open_clip_text": "precompute.encoders.text:open_clip_text",
        "hf_clip_text": "precompute.encoders.text:hf_clip_text",
    },
    "optimizer": {
        "adam16": "recipes.builders:adam16",
        "adamw": "recipes.builders:adamw",
    },
    "schedule": {
        "constant": "recipes.builders:constant",
        "cosine": "recipes.builders:cosine",
        "linear": "recipes.builders:linear",
        "plateau": "callbacks.plateau:Plateau",
    },
    "algorithm": {
        "activation_checkpointing": "recipes.algorithms.activation_checkpointing:ActivationCheckpointing",
        "attention": "recipes.algorithms.attention:Attention",
        "channels_last": "recipes.algorithms.channels_last:ChannelsLast",
        "compile": "recipes.algorithms.compile:Compile",
        "fused_group_norm": "recipes.algorithms.fused_group_norm:FusedGroupNorms",
        "low_precision_norms": "recipes.algorithms.low_precision_norms:LowPrecisionNorms",
        "powersgd": "recipes.algorithms.powersgd:PowerSGD",
        "resblock_grad_scaling": "recipes.algorithms.resblock_grad_scaling:ResblockGradScaling",
        "scheduled_ema": "recipes.algorithms.scheduled_ema:ScheduledEMA",
    },
    "callback": {
        "codebook": "callbacks.codebook:Codebook",
        "exponents": "callbacks.exponents:Exponents",
        "export": "callbacks.export:Export",
        "gradient_scales": "callbacks.gradient_scales:GradientScales",
        "lr_monitor": "recipes.builders:lr_monitor",
        "memory_monitor": "recipes.builders:memory_monitor",
        "progress": "callbacks.progress:Progress",
        "sample_grid": "callbacks.sample_grid:SampleGrid",
        "token_grid": "callbacks.token_grid:TokenGrid",
        "reconstructions": "callbacks.reconstructions:Reconstructions",
        "scheduled_value": "callbacks.scheduled_value:ScheduledValue",
        "throughput": "callbacks.throughput:Throughput",
        "unigram": "callbacks.unigram:Unigram",
    },
    "logger": {
        "tensorboard": "recipes.builders:tensorboard",
        "wandb": "recipes.builders:wandb",
        "mlflow": "recipes.builders:mlflow",
    },
}
