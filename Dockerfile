# jaxtune on NVIDIA's CUDA base image; the host needs driver 580 or newer and the NVIDIA container toolkit.
#
#   docker build -t jaxtune .
#   docker run --gpus all -v "$PWD:/data" -w /data jaxtune train lora-8b data.train=rows.jsonl
#
# jax's wheels bring CUDA's libraries, so the base image is enough.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE /usr/local/src/jaxtune/
COPY scripts/build_backend.py /usr/local/src/jaxtune/scripts/build_backend.py
COPY jaxtune /usr/local/src/jaxtune/jaxtune
RUN python3 -m venv /usr/local/venv \
    && cd /usr/local/src/jaxtune \
    && /usr/local/venv/bin/pip install --no-cache-dir --constraint constraints.txt '.[cuda13]'

ENV PATH=/usr/local/venv/bin:$PATH
ENTRYPOINT ["jaxtune"]
