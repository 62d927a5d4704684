# Triton and CUDA kernels on an NVIDIA GPU. The host needs the driver and the NVIDIA Container Toolkit.
#   docker build -f docker/cuda.Dockerfile -t kagent:cuda .
#   docker run --rm --init --cap-add SYS_NICE --gpus all kagent:cuda doctor
#   docker run --rm --init --cap-add SYS_NICE --gpus all -v "$PWD:/work" kagent:cuda evolve softmax --budget 50
# What isolation is left inside: docs/isolation.md, "In Docker".
FROM python:3.12-slim-bookworm
# CUDA's libraries come with torch and the extra `cuda`; the toolkit of the host adds the driver's.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt '/src[cuda]' \
    && rm -rf /src
# For --user 1000: a home, where figures of the machine are kept.
RUN useradd --create-home --uid 1000 kagent
WORKDIR /work
ENTRYPOINT ["kagent"]
CMD ["--help"]
