"""The Lua scripts as text: each says what it is given and names it before it does anything."""

import re
from pathlib import Path

import fakeredis
import pytest

from poc_core.state import keys, scripts

FOLDER = Path(scripts.__file__).parent / "lua"
NAMES = sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "common")
_NUMBERED = re.compile(r"^-- (?:KEYS:|ARGV:|     ) *(\d+) (\w+)", re.MULTILINE)


def parts(name: str) -> tuple[str, str]:
    """A script's opening comment and the rest."""
    text = scripts.source(name)
    code = re.search(r"^(?!--)", text, re.MULTILINE)
    assert code is not None
    return text[: code.start()], text[code.start() :]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_documents_and_names_what_it_is_given(name: str) -> None:
    comment, code = parts(name)
    assert re.search(r"^-- KEYS: ", comment, re.MULTILINE)
    assert re.search(r"^-- ARGV: ", comment, re.MULTILINE)
    assert re.search(r"^-- Returns ", comment, re.MULTILINE)
    named = {
        local.strip()
        for names in re.findall(
            r"^local ([\w, ]+) = (?:unpack\((?:KEYS|ARGV)|(?:KEYS|ARGV)\[)", code, re.MULTILINE
        )
        for local in names.split(",")
    }
    assert named == {documented for _, documented in _NUMBERED.findall(comment)}
    assert not re.search(r"(KEYS|ARGV)\[\d", re.sub(r"^local .*$", "", code, flags=re.MULTILINE))


def test_a_key_that_a_script_spells_out_is_one_that_keys_names() -> None:
    spelled = {
        key
        for name in [*NAMES, "common"]
        for key in re.findall(r"'(poc:[\w:]*)'", scripts.source(name))
    }
    prefixes = {
        key("")
        for key in (
            *(keys.job, keys.active, keys.line, keys.round, keys.generating),
            *(keys.outbox, keys.receiver, keys.worker, keys.host, keys.download, keys.events),
        )
    }
    prefixes |= {keys.validations(0).removesuffix("0")}
    named = {value for name, value in vars(keys).items() if name.isupper()} | prefixes
    # the first: of a second's number
    of_scripts_alone = {"poc:stats:by:", "poc:outbox:job_bytes"}
    assert spelled - named == of_scripts_alone


def test_no_script_adds_a_negative_number_that_may_be_minus_zero() -> None:
    """Redis takes Lua's -0 for no number; fakeredis does. string.format('%d', ...) makes it 0."""
    adds = re.compile(r"'\w*(?:INCR|DECR)BY'[^()]*, *-\w+\)")
    found = {name: adds.findall(scripts.source(name)) for name in [*NAMES, "common"]}
    assert not any(found.values()), found


def test_a_script_has_of_what_all_share_only_what_it_uses() -> None:
    """Redis makes all functions of a script anew with each call."""
    assert "function count_past" in scripts.whole("complete")
    assert scripts.whole("count_jobs") == scripts.source("count_jobs")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_all_that_it_uses(name: str) -> None:
    shared = set(re.findall(r"^local (?:function )?(\w+)", scripts.source("common"), re.MULTILINE))
    text = re.sub(r"--.*", "", scripts.whole(name))
    used = shared & set(re.findall(r"\w+", text))
    defined = set(re.findall(r"^local (?:function )?(\w+)", text, re.MULTILINE))
    assert used <= defined | set(re.findall(r"local (\w+)", text))


def test_a_script_runs_on_the_client_that_kombu_and_locks_pass_by_name() -> None:
    redis = fakeredis.FakeRedis()
    script = scripts.SharedScript(redis, "return ARGV[1]")
    with redis.pipeline() as pipe:
        script(keys=[], args=["7"], client=pipe)
        assert pipe.execute() == [b"7"]
    assert script(args=["8"], client=redis) == b"8"
    other = fakeredis.FakeRedis(server=fakeredis.FakeServer())  # redis-py keeps the first script
    assert script(args=["9"], client=other) == b"9"
