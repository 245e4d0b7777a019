# A worker with CUDA vLLM. vLLM's own image brings Python, PyTorch and CUDA that fit each other; the tag is one of the
# releases that workers/vllm_compat.py knows.
FROM vllm/vllm-openai:v0.25.1

WORKDIR /srv/proofline
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY cli cli
COPY models models
COPY poc_core poc_core
COPY workers workers
RUN pip install --no-cache-dir .

ENTRYPOINT ["proofline"]
CMD ["worker", "--help"]
