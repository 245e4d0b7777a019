"""Builds a request body of any proof scheme from `--scheme NAME --param KEY=VALUE`."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel, ValidationError

from cli.options import DEFAULT_K_DIM, Proof
from cli.terminal import UsageError
from poc_core.schemes import requests
from poc_core.schemes.contract import Contract, contract_of, contracts, recognised
from proofline.client.errors import describe_detail

# The schemes' names for a callback's url.
_URLS = ("url", "callback_url")


class OfScheme(NamedTuple):
    """The options --scheme and --param, which name a proof scheme and its parameters."""

    scheme: Annotated[
        str | None,
        typer.Option(
            help="Name of the scheme, such as decode. Default: chosen by the other options."
        ),
    ] = None
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A parameter of --scheme; repeatable."),
    ] = None

    def refuse_flags(self, flags: Mapping[str, Any]) -> bool:
        """Returns True if --scheme is given. Raises UsageError if it is combined with `flags`."""
        if self.scheme is None:
            if self.param:
                raise UsageError("--param is for --scheme; name the scheme too.")
            return False
        if given := [name for name, value in flags.items() if value]:
            raise UsageError(
                f"{' and '.join(given)} cannot be combined with --scheme; write --param KEY=VALUE."
            )
        return True


def flags_of_artifacts(proof: Proof) -> dict[str, Any]:
    """Returns artifact and decode options by name; a value is falsy if the option is not used."""
    return {
        "--k-dim": proof.k_dim != DEFAULT_K_DIM,
        "--stronger-rng": proof.stronger_rng,
        "--max-tokens": proof.max_tokens,
    }


def job_of(of_scheme: OfScheme, common: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of POST /generate for --scheme. `common`, `fields`: see `_body`."""
    contract = contract_of(of_scheme.scheme or "")
    instead = "jobs; start a round of it"
    return _body(contract, contract.job_body, instead, of_scheme.param or [], common, fields)


def round_of(of_scheme: OfScheme, common: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of POST /init/generate for --scheme. `common`, `fields`: see `_body`."""
    contract = contract_of(of_scheme.scheme or "")
    instead = "rounds; `proofline generate` asks it"
    return _body(contract, contract.round_body, instead, of_scheme.param or [], common, fields)


def _body(
    contract: Contract,
    model: type[BaseModel] | None,
    instead: str,
    params: Sequence[str],
    common: dict[str, Any],
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Returns a request body that is valid for `model`, the pydantic model of the scheme's body.

    `instead`: end of the UsageError's text if `model` is None, because the scheme has no such
    request. `params`: the values of --param. `common`: fields that are the same in all schemes.
    `fields`: model, seq_len, batch_size and url (None if not given); their position in the body
    depends on the scheme. Raises UsageError for a missing or unknown parameter.
    """
    if model is None:
        raise UsageError(f"The {contract.name} scheme has no {instead}.")
    inner = _inner(model)
    body = dict(common)
    within: dict[str, Any] = {}
    known = _scheme_fields(model, inner)
    given = dict(named_value(text, "--param", "KEY=VALUE") for text in params)
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"The {contract.name} scheme has no parameter {unknown[0]}; it has"
            f" {', '.join(sorted(known)) or 'none'}."
        )
    if "url" in fields:
        name = next((name for name in _URLS if name in model.model_fields), "url")
        fields[name] = fields.pop("url")
    for name, value in {**fields, **given}.items():
        if value is not None:
            (within if name in inner else body)[name] = value
    if inner:
        body["params"] = within
        if recognised(body, contracts()) is not contract:
            within["scheme"] = contract.name
    try:
        model.model_validate(body)
    except ValidationError as error:
        problems = describe_detail(error.errors(include_url=False, include_context=False))
        raise UsageError(f"The {contract.name} scheme: {problems}.") from None
    return body


def _inner(model: type[BaseModel]) -> set[str]:
    field = model.model_fields.get("params")
    return set(getattr(field.annotation, "model_fields", ())) if field else set()


def _scheme_fields(model: type[BaseModel], inner: set[str]) -> set[str]:
    """Returns the names that --param may set: fields of this scheme only, and no nested objects."""
    shared = {"params", "scheme", "model", "seq_len", "batch_size", *_URLS}
    for base in (requests.JobBody, requests.RoundBody, requests.SequenceRoundBody, requests.Params):
        shared |= set(base.model_fields)
    schema = model.model_json_schema()
    nested = {name for name, about in schema["properties"].items() if "$ref" in json.dumps(about)}
    return (set(model.model_fields) | inner) - shared - nested


def named_value(text: str, option: str, form: str = "NAME=VALUE") -> tuple[str, Any]:
    """Parses "NAME=VALUE" to (name, value). A VALUE that is not JSON is taken as a string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"{option} takes {form}, not {text!r}.")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
