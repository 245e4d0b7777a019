# Workers on GPUs. vLLM's own image brings Python, PyTorch, CUDA and vLLM that fit each other; the tag is one of the
# releases that workers/vllm/release knows.
ARG VLLM_VERSION=v0.25.1
# The base is Debian's release and Python's minor version; whoever wants it to the byte gives a digest:
#   --build-arg PYTHON=python:3.12-slim-bookworm@sha256:...
ARG PYTHON=python:3.12-slim-bookworm

# A stage of its own: as long as this list stays the same, no change of pyproject.toml installs what is in it anew.
FROM ${PYTHON} AS requirements
WORKDIR /build
COPY scripts/requirements.py scripts/
COPY pyproject.toml ./
RUN python scripts/requirements.py > requirements.txt

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

FROM vllm/vllm-openai:${VLLM_VERSION}
RUN useradd --uid 10001 --create-home proofline && install -d -o proofline /cache
WORKDIR /home/proofline
# What we need beside vLLM, before what we are; gigabytes of the base stay as they are.
COPY --from=requirements /build/requirements.txt ./
RUN python3 -m pip install --no-cache-dir -r requirements.txt
# uv, which made that image, compiles nothing: each process of an engine would do it again, for some 20 s.
RUN python3 -Pc "import compileall, importlib.util; \
found = filter(None, map(importlib.util.find_spec, ('torch', 'transformers', 'vllm'))); \
[compileall.compile_dir(one.submodule_search_locations[0], quiet=2, workers=0) for one in found]"
# The models that ship have a layer of their own: a change of our code is a layer of 9 MB.
COPY models /opt/proofline/models
# Compiled files tell the source's hash, not its date.
ARG SOURCE_DATE_EPOCH=0
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && models=$(python3 -Pc "import cli; print(cli.__path__[0])")/models && rm -r "$models" && ln -s /opt/proofline/models "$models"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN --mount=type=bind,from=sbom,source=/sbom,target=/sbom \
    install -d /usr/share/proofline \
    && python3 /sbom/sbom.py proofline-worker-gpu > /usr/share/proofline/sbom.cdx.json
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="proofline-worker-gpu" \
      org.opencontainers.image.description="Proofline: workers on GPUs" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER proofline
HEALTHCHECK --interval=15s --timeout=10s --retries=4 --start-period=30m --start-interval=5s \
    CMD ["sh", "-c", "test -n \"$(find ${TMPDIR:-/tmp}/proofline-ready -mmin -1)\""]
ENTRYPOINT ["proofline"]
CMD ["workers", "--help"]
