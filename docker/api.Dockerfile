# API, courier and Flower: everything that needs no engine. No torch.
# A stage of its own: as long as the lock stays the same, no change of our code installs what is in it anew.
FROM python:3.12-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /build
COPY locks/api.txt locks/
RUN /opt/venv/bin/pip install --no-deps --require-hashes -r locks/api.txt

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

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home proofline && install -d -o proofline -m 700 /keys
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
USER proofline
WORKDIR /home/proofline
ENTRYPOINT ["proofline"]
CMD ["api", "--host", "0.0.0.0"]
