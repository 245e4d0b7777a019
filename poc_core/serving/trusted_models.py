"""The repositories whose code engines may run (--trust-remote-code), each at one commit."""

import re
from collections.abc import Collection, Mapping

# The chain's models, at the commits of the network's deployments.
SHIPPED = frozenset(
    {
        "MiniMaxAI/MiniMax-M2.7@d494266a4affc0d2995ba1fa35c8481cbd84294b",
        "deepseek-ai/DeepSeek-V4-Flash-0731@7872f01b1d1fe23eabc4c98b48bffcef5a386062",
        "MJPansa/DeepSeek-V4-Flash-0731-NVFP4@64d64cd89bc63a66aa46506da89d7821f7491c62",
        "zai-org/GLM-5.3-Flash@04c4e9e95c5da8862dced7e5056455116f83a7e0",
    }
)
_PINNED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}", re.ASCII)
# Arguments that name a repository with other code.
_ELSEWHERE = ("tokenizer", "tokenizer-revision")


def parse_trusted(text: str) -> frozenset[str]:
    """Returns SHIPPED and the repositories in `text`. Raises ValueError, which describes valid
    entries, if an entry is invalid.
    """
    added = {entry.strip() for entry in text.split(",") if entry.strip()}
    if not all(_PINNED.fullmatch(entry) for entry in added):
        raise ValueError(
            "must be repositories at commits of 40 digits, such as org/name@0123...cdef, after"
            " commas"
        )
    return SHIPPED | added


def why_not_trusted(
    model: str, arguments: Mapping[str, str], trusted: Collection[str]
) -> str | None:
    """Returns why engines must not run the code of this model; None if they may. `arguments`: the
    last value of each argument of `vllm serve`, by name without dashes.
    """
    for name in _ELSEWHERE:
        if name in arguments:
            return f"not together with --{name}, whose code is not listed"
    revision = arguments.get("revision")
    if revision is None:
        return (
            "not without the --revision that is trusted; if the model needs its own code, give"
            f" --revision and POC_TRUSTED_MODELS={model}@COMMIT"
        )
    if f"{model}@{revision}" in trusted:
        return None
    return f"not trusted here; a model that needs it requires POC_TRUSTED_MODELS={model}@{revision}"
