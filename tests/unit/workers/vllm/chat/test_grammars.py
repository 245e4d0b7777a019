"""Grammars are tried before vLLM has them: by a process that stands in for the one with xgrammar,
and by that."""

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.harness.marks import needs_vllm
from workers.vllm.chat import grammars
from workers.vllm.chat.errors import BadRequest, Unavailable
from workers.vllm.chat.grammars import Grammars, schemas_in_tags, text_of

# Answers what each text says, after so many seconds (at its first try, at later ones); notes what
# it began. A stopped text had 100 s of CPU time; `starves` had none.
STAND_IN = """
    import json, os, select, sys
    noted = open(sys.argv[1], "a", buffering=1)
    held = b""
    tried = []
    def line():
        global held
        while b"\\n" not in held:
            read = os.read(0, 65536)
            if not read:
                sys.exit()
            held += read
        one, _, held = held.partition(b"\\n")
        return one
    line()
    os.write(1, b"ready\\n")
    while True:
        asked = json.loads(line())
        if asked is None:
            continue
        kind, text = asked
        print(text, file=noted)
        seconds, wrong, _ = text.split("|")
        if wrong == "dies":
            sys.exit(1)
        wait_s = float(seconds.split(",")[-1 if text in tried else 0])
        if select.select([0], [], [], wait_s)[0]:
            wrong = 0.0 if wrong == "starves" else 100.0
        tried.append(text)
        os.write(1, json.dumps(wrong).encode() + b"\\n")
"""


class Tried:
    def __init__(self, folder: Path, longest_s: float) -> None:
        script = folder / "stand_in.py"
        script.write_text(textwrap.dedent(STAND_IN))
        self._notes = folder / "notes"
        self.grammars = Grammars(
            lambda: "vocabulary", (sys.executable, str(script), str(self._notes)), longest_s, 0.1
        )

    def begun(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def check(self, text: str, client: str = "one") -> "asyncio.Task[None]":
        return asyncio.create_task(self.grammars.check("json", text, client))

    async def has_begun(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.begun():
                await asyncio.sleep(0.01)


@pytest.fixture
async def tried(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    """Grammars that may take a minute to compile, or so many seconds."""
    found = Tried(tmp_path, getattr(request, "param", 60.0))
    yield found
    await found.grammars.close()


async def test_a_grammar_that_compiles_is_tried_once(tried: Tried) -> None:
    for _ in range(3):
        await tried.check("0||a")
    assert tried.begun() == ["0||a"]


async def test_one_that_takes_too_much_is_refused_each_time(tried: Tried) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match="takes too much memory to compile") as refused:
            await tried.check("0|takes too much memory to compile|a")
        assert refused.value.param == "structured_outputs"
    assert len(tried.begun()) == 2


@pytest.mark.parametrize("is_final", [True, False], ids=["xgrammar", "auto"])
async def test_one_that_is_wrong_is_refused_where_no_other_compiler_follows(
    tried: Tried, is_final: bool
) -> None:
    vars(tried.grammars)["_is_final"] = is_final
    with pytest.raises(BadRequest, match="is wrong: a") if is_final else nullcontext():
        await tried.check("0|is wrong: a|a")
    with pytest.raises(BadRequest, match="too much"):
        await tried.check("0|takes too much|a")


@pytest.mark.parametrize("tried", [2.0], indirect=True)
async def test_one_that_takes_too_long_is_ended_and_the_next_is_tried(tried: Tried) -> None:
    long, after = tried.check("60||a"), tried.check("0||b")
    with pytest.raises(BadRequest, match="takes longer to compile than 2 s"):
        await long
    await after


@pytest.mark.parametrize("tried", [0.5], indirect=True)
@pytest.mark.parametrize("is_final", [True, False], ids=["xgrammar", "auto"])
async def test_one_that_got_no_cpu_is_not_called_slow(tried: Tried, is_final: bool) -> None:
    vars(tried.grammars)["_is_final"] = is_final
    with pytest.raises(Unavailable, match="too busy to try grammars now; ask again"):
        await tried.check("60|starves|a")
    await tried.check("0||b")


@pytest.mark.promise("a chat user with slow grammars", "does not delay other users' grammars")
async def test_with_its_client_a_trial_ends(tried: Tried) -> None:
    gone = tried.check("600||a")
    await tried.has_begun("600||a")
    gone.cancel()
    await asyncio.wait_for(tried.check("0||b"), 30)  # before it would have taken too long


async def test_a_trial_under_way_does_not_keep_grammars_from_closing(tried: Tried) -> None:
    slow = tried.check("600||a")
    await tried.has_begun("600||a")
    await tried.grammars.close()
    slow.cancel()


@pytest.mark.promise("a chat user with slow grammars", "does not delay other users' grammars")
async def test_one_client_with_many_slow_ones_keeps_no_other_waiting(tried: Tried) -> None:
    greedy = [tried.check(f"600||{number}", "greedy") for number in range(10)]
    await tried.has_begun("600||0")
    await asyncio.wait_for(tried.check("0||b", "other"), 30)
    assert not any(one.done() for one in greedy)
    for one in greedy:
        one.cancel()


async def test_one_that_gave_way_is_tried_again(tried: Tried) -> None:
    slow = tried.check("600,0||a", "one")
    await tried.has_begun("600,0||a")
    await tried.check("0||b", "other")
    await slow
    assert tried.begun() == ["600,0||a", "0||b", "600,0||a"]


@pytest.mark.parametrize("is_final", [True, False], ids=["xgrammar", "auto"])
async def test_without_its_process_only_a_grammar_that_vllm_parses_itself_goes_on(
    tried: Tried, is_final: bool
) -> None:
    vars(tried.grammars)["_is_final"] = is_final
    with pytest.raises(Unavailable, match="cannot try grammars") if is_final else nullcontext():
        await tried.check("0|dies|a")
    await tried.check("0||b")  # by another process
    assert tried.begun() == ["0|dies|a", "0||b"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"json": {"type": "object"}}, ("json", '{"type": "object"}')),
        ({"json": '{"type": "object"}'}, ("json", '{"type": "object"}')),
        ({"choice": ["a", "b"]}, ("choice", '["a", "b"]')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"json_object": True}, ("json", '{"type": "object"}')),
        ({"json_object": False}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_a_request_asks_for(asked: dict[str, Any], found: tuple[str, str] | None) -> None:
    params = type("Params", (), asked)()
    assert text_of(params) == found


WRONG = (
    ({"type": "none"}, "is wrong: Unsupported type"),
    ({"type": "string", "pattern": "("}, "is wrong: Regex parsing error"),
    ({"type": "string", "minLength": -5}, "is wrong: .*lower"),
    ({"$ref": "#/x"}, "is wrong: Cannot find field x"),
    ({"$ref": "#"}, "allows no first token of an answer"),
)


def _plain(schema: Any) -> tuple[str, str]:
    return "json", json.dumps(schema)


def _tag(schema: Any) -> tuple[str, str]:
    content = {"type": "json_schema", "json_schema": schema}
    return "structural_tag", json.dumps({"type": "structural_tag", "format": content})


def _triggered(schema: Any, other: Any = None) -> tuple[str, str]:
    """Which an answer need not come to."""
    content = other or {"type": "json_schema", "json_schema": schema}
    one = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    several = {"type": "triggered_tags", "triggers": ["<f"], "tags": [one]}
    return "structural_tag", json.dumps({"type": "structural_tag", "format": several})


def _old(schema: Any) -> tuple[str, str]:
    one = {"begin": "<f>", "schema": schema, "end": "</f>"}
    return "structural_tag", json.dumps({"structures": [one], "triggers": ["<f"]})


@pytest.mark.parametrize("form", [_tag, _triggered, _old])
def test_schemas_of_a_clients_structural_tags_are_found(form: Any) -> None:
    schema = {"type": "object", "properties": {"schema": {"type": "integer"}}}
    _, text = form(schema)
    outputs = SimpleNamespace(structural_tag=text)
    asked = SimpleNamespace(type="structural_tag", model_dump_json=lambda by_alias: text)
    for body in (
        SimpleNamespace(structured_outputs=outputs),
        SimpleNamespace(response_format=asked),
    ):
        assert list(schemas_in_tags(body)) == [schema]
    for text in ("{", "[]", "5", ""):
        outputs.structural_tag = text
        assert list(schemas_in_tags(SimpleNamespace(structured_outputs=outputs))) == []
    other = SimpleNamespace(structured_outputs=None, response_format=SimpleNamespace(type="text"))
    assert list(schemas_in_tags(other)) == []


@pytest.mark.xdist_group("engines")
@needs_vllm
async def test_xgrammar_compiles_them_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from xgrammar import TokenizerInfo, VocabType

    monkeypatch.setattr(grammars, "_START_S", 280)  # a busy machine
    signs = [chr(number) for number in range(32, 127)]
    words = ["".join(letters) for letters in product("abcdefghijklmnop", repeat=3)]
    vocabulary: Callable[[], str] = TokenizerInfo(
        signs + words, VocabType.RAW, stop_token_ids=[0]
    ).serialize_json
    of_others = set(psutil.Process().children())  # engines of tests before have such a process too
    tried = Grammars(vocabulary, grammars.PROCESS, longest_s=100, patience_s=280)

    try:
        await tried.check("regex", "a", "one")
        (process,) = set(psutil.Process().children()) - of_others
        assert process.nice() > psutil.Process().nice()  # the engine's steps go first
        for kind, text in {
            "json": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
            "regex": "(a|b)+",
            "choice": '["yes", "no"]',
            "grammar": 'root ::= "yes" | "no"',
        }.items():
            await tried.check(kind, text, "one")
        await tried.check("choice", "no list", "one")  # which is vLLM's to say
        for form in (_plain, _tag, _triggered, _old):
            await tried.check(*form({"type": "object"}), "one")
            for schema, why in WRONG:
                with pytest.raises(BadRequest, match=why):
                    await tried.check(*form(schema), "one")
        with pytest.raises(BadRequest, match="allows no token"):
            await tried.check(*_triggered({}, {"type": "grammar", "grammar": "root ::= root"}), "1")
        texts = {f"p{n}": {"type": "string", "maxLength": 5000 + n} for n in range(40)}
        slow = json.dumps({"type": "object", "properties": texts})  # ten seconds of an idle core
        monkeypatch.setattr(tried, "_longest_s", 0.5)
        monkeypatch.setattr(tried, "_share_s", 0.5)  # it looks four times within that
        with pytest.raises(BadRequest, match=r"takes longer to compile than 0\.5 s"):
            await ask_again(tried, "json", slow)
    finally:
        await tried.close()


async def ask_again(tried: Grammars, kind: str, text: str) -> None:
    """Repeats a request that a busy machine refused."""
    while True:
        with suppress(Unavailable):
            return await tried.check(kind, text, "one")


async def test_a_process_that_does_not_begin_is_ended_and_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "_START_S", 0.2)
    before = set(psutil.Process().children())
    tried = Grammars(lambda: "vocabulary", (sys.executable, "-c", "import time; time.sleep(600)"))
    for text in ("a", "b"):  # the second one begins no other process
        with pytest.raises(Unavailable, match="cannot try grammars"):
            await asyncio.wait_for(tried.check("json", text, "one"), 60)
        assert set(psutil.Process().children()) <= before
    await tried.close()


# Tries a grammar in a child without end, which holds the output open.
FORKS = """
import os, time
os.write(1, b"ready\\n")
if os.fork() == 0:
    time.sleep(600)
os.wait()
"""


async def test_the_child_that_tries_a_grammar_ends_with_its_process() -> None:
    tried = Grammars(lambda: "vocabulary", (sys.executable, "-c", FORKS))
    of_others = set(psutil.Process().children(recursive=True))
    checking = asyncio.create_task(tried.check("json", "a", "one"))
    async with asyncio.timeout(60):
        while len(own := set(psutil.Process().children(recursive=True)) - of_others) < 2:
            await asyncio.sleep(0.01)
    try:
        await asyncio.wait_for(tried.close(), 60)
        assert psutil.wait_procs(own, 60)[1] == []
    finally:
        checking.cancel()
        for one in own:
            with suppress(psutil.NoSuchProcess):
                one.kill()


async def test_a_process_that_takes_long_to_begin_keeps_nobody_long() -> None:
    before = set(psutil.Process().children())
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    tried = Grammars(lambda: "vocabulary", command, patience_s=0.2)
    together = await asyncio.gather(
        *(tried.check("json", str(n), "one") for n in range(4)), return_exceptions=True
    )
    assert [type(one) for one in together] == [Unavailable] * 4
    await tried.close()
    assert set(psutil.Process().children()) <= before
