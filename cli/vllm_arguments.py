"""The arguments after `--`, which go to vLLM as they are."""

from cli.console import UsageError


def after_dashes(arguments: list[str] | None) -> list[str]:
    """The arguments, after a check that they are vLLM's and no slip in front of the `--`.

    The parser has dropped the `--` itself; but a word that does not follow an option cannot have been meant for vLLM.
    """
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"{arguments[0]!r} is not an option; vLLM's own arguments go to the end, after --.")
    return list(arguments or [])
