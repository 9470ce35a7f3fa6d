# Trains a recipe:   docker build -t precompose .
#                    docker run --gpus all --ipc=host -v "$PWD/runs:/precompose/runs" precompose yamls/sd2_base.yaml
# For torch 2.11:    docker build --build-arg LOCK=requirements-torch211.lock -t precompose:torch211 .
# The runs folder must be writable by uid 1000. --ipc=host gives the data workers shared memory.

# Not a CUDA image: torch's wheels contain CUDA, cuDNN and NCCL, and the driver comes from the host.
# Not a slim image: Triton compiles its launchers with a C compiler and Python's headers, which slim images lack.
FROM python:3.11.13-bookworm

# The locks are copied first, so that a change of the code does not install 6 GB again.
ARG LOCK=requirements.lock
COPY requirements.lock requirements-torch211.lock /tmp/locks/
# Bytecode is compiled here, because the user who runs the container cannot write it later.
RUN pip install --no-cache-dir --no-compile --no-deps "$(grep '^uv==' "/tmp/locks/$LOCK")" \
    && uv pip install --system --no-cache --compile-bytecode --no-deps -r "/tmp/locks/$LOCK"

WORKDIR /precompose
COPY LICENSE NOTICE ./
COPY recipes ./recipes
COPY callbacks ./callbacks
COPY data ./data
COPY precompute ./precompute
COPY cluster ./cluster
COPY yamls ./yamls

RUN useradd --uid 1000 --create-home precompose \
    && mkdir runs \
    && chown precompose:precompose runs
USER 1000

# The parts of the host's driver that the container gets, as a CUDA base image would set them.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/precompose/runs/.cache \
    TRITON_CACHE_DIR=/precompose/runs/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/precompose/runs/.cache/inductor

# Paths in a recipe (runs/…, yamls/…) are relative to /precompose.
ENTRYPOINT ["composer", "recipes/train.py"]
CMD ["--help"]
