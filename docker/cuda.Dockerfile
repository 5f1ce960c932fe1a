# SPDX-License-Identifier: Apache-2.0
# The plugin on vLLM's official image, whose vLLM and torch stay as they are. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t vllm-mmcache:cuda .
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

WORKDIR /opt/mmcache/source
COPY . .
# The image's Python is the system's, which pip would not touch unasked. The constraint keeps what the image brings.
ENV PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -m pip freeze --exclude-editable > /tmp/image.txt \
    && grep -E '^(torch|torchvision|torchaudio|vllm|transformers|numpy)==' /tmp/image.txt > /tmp/kept.txt \
    && python3 -m pip install --constraint /tmp/kept.txt '.[cuda,encryption]' \
    && rm /tmp/image.txt /tmp/kept.txt \
    && useradd --create-home --uid 10001 mmcache \
    && install --directory --owner=mmcache /var/lib/mmcache

ENV MMCACHE_STORE=/var/lib/mmcache
WORKDIR /var/lib/mmcache
USER 10001
VOLUME /var/lib/mmcache
EXPOSE 8000
# A first start downloads the model. A success ends the period at once.
HEALTHCHECK --start-period=1800s --interval=10s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mmcache", "serve"]
