# Trains a recipe:   docker build -t precompose .
#                    docker run --gpus all --ipc=host -v "$PWD/runs:/precompose/runs" precompose yamls/sd2_base.yaml
# For torch 2.11:    docker build --build-arg LOCK=requirements-torch211.lock -t precompose:torch211 .
# The runs folder must be writable by uid 1000. --ipc=host gives the data workers shared memory. The build needs
# BuildKit, which has been docker's default since version 23, or buildah; `make test-image` tries the image.

# Not a CUDA image: torch's wheels contain CUDA, cuDNN and NCCL, and the driver comes from the host. Another name, such
# as that of a mirror, must have the same Python in the same place: the environment is made in one stage for the other.
ARG BASE=python:3.11.13-slim-bookworm

# --- the environment ---------------------------------------------------------------------------

FROM ${BASE} AS build
ARG LOCK=requirements.lock
# Where packages come from and which certificates are trusted, as pip and uv read them from the environment. A stage
# that is not the last leaves no trace of them in the image.
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
# The cache is another file system than the environment, so files cannot be linked.
ENV UV_CACHE_DIR=/var/cache/uv \
    UV_LINK_MODE=copy \
    UV_PYTHON_DOWNLOADS=never

# The locks are copied first, so that a change of the code does not install 7 GB again.
WORKDIR /build
COPY requirements.lock requirements-torch211.lock ./
# Bytecode is compiled here, because the user who runs the container cannot write it later.
RUN --mount=type=cache,target=/var/cache/uv,sharing=locked \
    python -m venv uv \
    && uv/bin/pip install --no-cache-dir --no-compile --no-deps "$(grep '^uv==' "$LOCK")" \
    && uv/bin/uv venv --python "$(command -v python)" /venv \
    && uv/bin/uv pip install --python /venv --compile-bytecode --no-deps -r "$LOCK"

# A list of the installed packages with their licences. Its maker has an environment of its own, which is left behind.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/var/cache/uv,sharing=locked \
    uv/bin/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment /venv/bin/python \
        --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json

# --- the image ---------------------------------------------------------------------------------

FROM ${BASE}
# Triton compiles its launchers with a C compiler, and torch.compile compiles for CPUs with a C++ compiler; g++ brings
# both, and the headers of C. The base has Python's headers. Its pip and setuptools are not used: without them the
# environment has all Python packages of the image. Debian's mirrors have the newest versions only, so none are named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /usr/local/lib/python3.11/site-packages/* /usr/local/bin/pip* \
    && useradd --uid 1000 --create-home precompose

COPY --from=build /venv /venv
COPY --from=build /build/sbom.cdx.json /usr/share/doc/precompose/sbom.cdx.json

WORKDIR /precompose
# The doctor compares the environment with the locks.
COPY LICENSE NOTICE requirements.lock requirements-torch211.lock ./
COPY recipes ./recipes
COPY callbacks ./callbacks
COPY data ./data
COPY precompute ./precompute
COPY cluster ./cluster
COPY yamls ./yamls
RUN mkdir runs && chown precompose:precompose runs
USER 1000

# Then the parts of the host's driver that the container gets, as a CUDA base image would set them.
ENV PATH=/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/precompose/runs/.cache \
    TRITON_CACHE_DIR=/precompose/runs/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/precompose/runs/.cache/inductor \
    PRECOMPOSE_HEARTBEATS=/tmp/heartbeats

# Last, since it changes with each commit: --build-arg REVISION="$(git rev-parse HEAD)"
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="Precompose" \
      org.opencontainers.image.description="Trains text-to-image models from precomputed latents and tokens" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# Says nothing of jobs that do not train. The driver's own list of GPUs may take a minute before it counts as hung.
HEALTHCHECK --interval=60s --timeout=90s --retries=3 CMD ["python", "/precompose/cluster/health.py"]

# Paths in a recipe (runs/…, yamls/…) are relative to /precompose.
ENTRYPOINT ["composer", "recipes/train.py"]
CMD ["--help"]
