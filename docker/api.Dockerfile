# API, courier and Flower: everything that needs no engine. No torch.
FROM python:3.12-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /build
# What we need, before what we are: a change of our code installs only the last layer anew.
COPY scripts/requirements.py scripts/
COPY pyproject.toml ./
RUN python scripts/requirements.py > requirements.txt && /opt/venv/bin/pip install -r requirements.txt

FROM build AS wheel
COPY README.md LICENSE ./
COPY models models
COPY poc_core poc_core
COPY workers workers
COPY api api
COPY cli cli
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home proofline
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
USER proofline
WORKDIR /home/proofline
ENTRYPOINT ["proofline"]
CMD ["api", "--host", "0.0.0.0"]
