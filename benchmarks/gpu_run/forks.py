"""What a process from which others are forked needs: CUDA does not survive a fork, so its imports must not start it."""

# Variables that must be set before torch is imported.
WITHOUT_CUDA = {
    # Whether there is a GPU is asked of the driver's library, and not of CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Importing inductor does not start the compiler's workers.
    "TORCH_WARM_POOL": "0",
    # xformers does not ask for the GPU's capability to find out whether it can use Triton.
    "XFORMERS_ENABLE_TRITON": "1",
}
