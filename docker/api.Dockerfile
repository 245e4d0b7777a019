# API, courier and Flower: everything that needs no engine and no GPU.
FROM python:3.12-slim

RUN useradd --create-home proofline
WORKDIR /srv/proofline
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY cli cli
COPY models models
COPY poc_core poc_core
COPY workers workers
RUN pip install --no-cache-dir .

USER proofline
ENTRYPOINT ["proofline"]
CMD ["api", "--host", "0.0.0.0"]
