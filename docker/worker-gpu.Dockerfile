# Workers on GPUs. vLLM's own image brings Python, PyTorch, CUDA and vLLM that fit each other; the tag is one of the
# releases that workers/vllm/compat.py knows.
ARG VLLM_VERSION=v0.25.1

# A stage of its own: as long as this list stays the same, no change of pyproject.toml installs what is in it anew.
FROM python:3.12-slim AS requirements
WORKDIR /build
COPY scripts/requirements.py scripts/
COPY pyproject.toml ./
RUN python scripts/requirements.py > requirements.txt

FROM python:3.12-slim AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY models models
COPY poc_core poc_core
COPY proofline proofline
COPY workers workers
COPY api api
COPY cli cli
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM_VERSION}
RUN useradd --uid 10001 --create-home proofline && install -d -o proofline /cache
WORKDIR /home/proofline
# What we need beside vLLM, before what we are; gigabytes of the base stay as they are.
COPY --from=requirements /build/requirements.txt ./
RUN python3 -m pip install --no-cache-dir -r requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER proofline
ENTRYPOINT ["proofline"]
CMD ["workers", "--help"]
