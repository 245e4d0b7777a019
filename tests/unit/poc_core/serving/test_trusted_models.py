"""Whose code engines run, and whose they do not."""

import pytest

from poc_core.errors import SettingsError
from poc_core.serving.trusted_models import SHIPPED, parse_trusted
from poc_core.serving.vllm_arguments import read_deployment
from poc_core.settings import load_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRUST = "--trust-remote-code"


def trusts(model: str, *words: str, trusted: str = f"acme/model@{COMMIT}") -> tuple[bool, str]:
    """Whether the argument is given on, and what is told where it is left out."""
    wanted = read_deployment(model, "auto", words, parse_trusted(trusted))
    return TRUST in wanted.vllm_args, " ".join(wanted.left_out)


def test_the_code_of_a_trusted_repository_at_a_trusted_commit_is_run() -> None:
    assert trusts("acme/model", "--revision", COMMIT, TRUST) == (True, "")
    assert trusts("acme/model", TRUST, "--revision=main", f"--revision={COMMIT}") == (True, "")
    for pinned in SHIPPED:
        model, _, commit = pinned.partition("@")
        assert trusts(model, "--revision", commit, TRUST, trusted="") == (True, "")


@pytest.mark.promise("a client that may deploy", "can run no code, read no file and open no port")
@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        ("acme/model", (TRUST,), "not without the --revision that is trusted"),
        (
            "acme/model",
            (TRUST, "--revision", "main"),
            "requires POC_TRUSTED_MODELS=acme/model@main",
        ),
        ("acme/model", (TRUST, "--revision", COMMIT, "--revision", "main"), "not trusted here"),
        ("acme/other", (TRUST, "--revision", COMMIT), f"POC_TRUSTED_MODELS=acme/other@{COMMIT}"),
        ("/models/x", (TRUST, "--revision", COMMIT), "not trusted here"),
        (
            "acme/model",
            (TRUST, "--revision", COMMIT, "--tokenizer", "evil/code"),
            "not together with --tokenizer, whose code is not listed",
        ),
        (
            "acme/model",
            (TRUST, "--revision", COMMIT, "--tokenizer-revision", "evil"),
            "not together with --tokenizer-revision",
        ),
    ],
)
def test_other_code_is_not_and_that_is_told(model: str, words: tuple[str, ...], told: str) -> None:
    given_on, said = trusts(model, *words)
    assert (given_on, said.startswith(f"{TRUST}: not ")) == (False, True)
    assert told in said


def test_who_does_not_ask_for_it_does_not_get_it() -> None:
    assert trusts("acme/model", "--revision", COMMIT) == (False, "")
    assert trusts("acme/model", "--revision", COMMIT, TRUST, "--no-trust-remote-code") == (
        False,
        "",
    )


@pytest.mark.promise("a client that may deploy", "can run no code, read no file and open no port")
@pytest.mark.parametrize(
    "text", ["acme/model", "acme/model@main", "model@" + COMMIT, f"/x@{COMMIT}", f"a/b@{COMMIT}0"]
)
def test_a_model_is_trusted_at_one_commit_only(text: str) -> None:
    with pytest.raises(SettingsError, match="POC_TRUSTED_MODELS: must be repositories at commits"):
        load_settings(trusted_models=text)
