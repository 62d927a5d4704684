# C++ kernels on the CPU; Triton is compiled, not timed.
#   docker build -f docker/cpu.Dockerfile -t kagent:cpu .
#   docker run --rm --init --cap-add SYS_NICE kagent:cpu doctor
#   docker run --rm --init --cap-add SYS_NICE -v "$PWD:/work" kagent:cpu evolve softmax --budget 50
# What isolation is left inside: docs/isolation.md, "In Docker".
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint /src/constraints.txt '/src[cpu]' \
    && rm -rf /src
# For --user 1000: a home, where figures of the machine are kept.
RUN useradd --create-home --uid 1000 kagent
WORKDIR /work
ENTRYPOINT ["kagent"]
CMD ["--help"]
