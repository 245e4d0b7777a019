"""Honest machines and cheats with one model: their proofs and answers, stored in files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import executors
from bench.harness.report import say
from cli.machine import cpu_memory
from lab.judge import chat_distance
from lab.judge.compute import request_of
from lab.measure.artifact_distance import artifacts as values_of
from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of
from tests.data.report.make import rounded
from tests.integration.chat_checks.known import Server, content, known, serving
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.vllm.start import cpu_threads

# seq_len -> number of block hashes, and of nonces for each.
PROOFS = {256: (5, 20), 1024: (2, 10)}
N_CHAINS, CHAIN_SEQ_LEN = 20, 128
N_ANSWERS, N_TOKENS = 20, 100
TEMPERATURE, WRONG_TEMPERATURE = executors.TEMPERATURE, executors.WRONG_TEMPERATURE
KEY = "node-1"
PARTS = (
    *(f"proof-{seq_len}-{n}" for seq_len, (n_hashes, _) in PROOFS.items() for n in range(n_hashes)),
    "answers",
    "chains",
)
# The network's rules for models that it has calibrated, and for others.
RULES = {
    "calibrated": executors.RULES,
    "others": chat_distance.Rules.of("a model", {}, "processed_logprobs"),
}


@dataclass(frozen=True)
class Machine:
    """An executor of proofs and chats."""

    name: str
    honest: bool = True
    weights: str = ""  # a change of WEIGHTS
    engine: str = "vllm"
    dtype: str = "bfloat16"
    at_once: int = 20  # nonces, chains or answers


VALIDATOR = Machine("validator")
MACHINES = (
    VALIDATOR,
    Machine("one at a time", at_once=1),
    Machine("vLLM, float32", dtype="float32"),
    Machine("transformers, bfloat16", engine="transformers"),
    Machine("transformers, float32", engine="transformers", dtype="float32"),
    *(Machine(name, honest=False, weights=name) for name in ("int8", "fp8", "int4", "pruned")),
)


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


# --- cheats -------------------------------------------------------------------------------------


def _fp8(weight: Tensor) -> Tensor:
    """Rounds each row to float8_e4m3fn, scaled by its largest value."""
    scale = weight.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    eighth = (weight.float() / scale).to(torch.float8_e4m3fn)
    return (eighth.float() * scale).to(weight.dtype)


def _pruned(name: str, weight: Tensor) -> Tensor:
    """Returns zeros for two layers, whose computation a cheat can then skip."""
    left_out = any(f".layers.{layer}." in name for layer in (14, 15))
    return torch.zeros_like(weight) if left_out and name.endswith(_ADDING) else weight


_ADDING = ("o_proj.weight", "down_proj.weight")
WEIGHTS: dict[str, Callable[[str, Tensor], Tensor]] = {
    "int8": lambda _name, weight: rounded(weight, 8),
    "fp8": lambda _name, weight: _fp8(weight),
    "int4": lambda _name, weight: rounded(weight.reshape(-1, 32), 4).view_as(weight),
    "pruned": _pruned,
}


def changed(model: Path, change: str, folder: Path) -> Path:
    """Returns a copy of the model with changed matrices, or the model itself for ""."""
    copy = folder / f"weights-{change}"
    if not change or (copy / "done").exists():
        return copy if change else model
    shutil.copytree(model, copy, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    matrices = {
        name: WEIGHTS[change](name, weight)
        for name, weight in weights.items()
        if weight.ndim == 2 and "layers" in name
    }
    save_file(weights | matrices, copy / "model.safetensors", {"format": "pt"})
    (copy / "done").touch()
    return copy


# --- what machines give -------------------------------------------------------------------------


@contextmanager
def engine_of(machine: Machine, model: Path, folder: Path) -> Iterator[Engine]:
    os.environ.setdefault(cpu_memory.VARIABLE, "1")
    os.environ.setdefault(cpu_threads.VARIABLE, "nobind")
    vllm = machine.engine == "vllm"
    options = EngineOptions(
        model=str(changed(model, machine.weights, folder)),
        served_model_name=model.name,
        engine=machine.engine,
        dtype=machine.dtype,
        max_batch_tokens=5120,
        decode_memory_gb=0.6 if vllm else None,
        vllm_args=("--enforce-eager", "--max-num-seqs", "32") if vllm else (),
    )
    engine = load_engine(options, rpc_timeout_s=600.0)
    try:
        yield engine
    finally:
        engine.close()


def proof_spec(seed: int, n: int, seq_len: int) -> ProofSpec:
    block_hash = f"trained-{seed}-{n}"
    options = {"k_dim": 12}
    return ProofSpec(block_hash=block_hash, public_key=KEY, seq_len=seq_len, options=options)


def chain_spec(seed: int, **more: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=f"trained-{seed}",
        public_key=KEY,
        seq_len=CHAIN_SEQ_LEN,
        options={"max_tokens": N_TOKENS, **more},
    )


def question(seed: int, n: int, temperature: float = TEMPERATURE) -> dict[str, Any]:
    asked = executors.request(n, temperature)
    return {**asked, "seed": seed * N_ANSWERS + n, "max_tokens": N_TOKENS}


def computed(machine: Machine, spec: ProofSpec, engine: Engine, n: int) -> dict[str, Any]:
    """Returns the proof of the first n nonces, as `proofline compute --json` writes it."""
    values = values_of(engine, spec, n, machine.at_once)
    contract = contract_of(spec.scheme)
    pairs = list(zip(range(n), values, strict=True))
    return {**contract.values(pairs), **contract.about(spec, {}), "request": request_of(spec)}


def answers(machine: Machine, engine: Engine, model: Path, asked: list[dict[str, Any]]) -> Any:
    if machine.engine == "transformers":
        return [executors.by_transformers(model, one, machine.dtype) for one in asked]
    with patient(engine) as server:
        return executors.answers(server, asked, machine.at_once)


@contextmanager
def patient(engine: Engine) -> Iterator[Server]:
    """Serves the engine's chat with a timeout for slow machines."""
    with serving(engine) as server:
        server.http.timeout = 1200
        yield server


def ask_all(machines: tuple[Machine, ...], model: Path, folder: Path, plan: "Plan") -> None:
    """Computes and writes the machines' missing results with one engine."""
    first = machines[0]
    if not any(plan.lacking(folder, machine) for machine in machines):
        return
    with engine_of(first, model, folder) as engine:
        for machine in machines:
            for what in plan.lacking(folder, machine):
                say(f"{machine.name}: {what}")
                write(path(folder, machine.name, what), plan.ask(what, machine, engine, model))


@dataclass(frozen=True)
class Plan:
    """The parts that are computed, and the seed of their block hashes and samplers."""

    seed: int
    parts: tuple[str, ...]

    def lacking(self, folder: Path, machine: Machine) -> list[str]:
        return [what for what in self.parts if not path(folder, machine.name, what).exists()]

    def ask(self, what: str, machine: Machine, engine: Engine, model: Path) -> Any:
        if what == "chains":
            return computed(machine, chain_spec(self.seed), engine, N_CHAINS)
        if what != "answers":
            _, seq_len, n = what.split("-")
            spec = proof_spec(self.seed, int(n), int(seq_len))
            return computed(machine, spec, engine, PROOFS[int(seq_len)][1])
        asked = [question(self.seed, n) for n in range(N_ANSWERS)]
        return answers(machine, engine, model, asked)


def path(folder: Path, name: str, what: str) -> Path:
    return folder / f"{slug(name)}-{what}.json"


def write(file: Path, document: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    part.rename(file)


def read(folder: Path, name: str, what: str) -> Any:
    return json.loads(path(folder, name, what).read_text())


# --- how the validator judges them --------------------------------------------------------------


def judge_chains(engine: Engine, plan: Plan, claimed: dict[str, Any]) -> list[list[float]]:
    """Returns for each chain the number of differing points and the largest margin."""
    points = {str(one["nonce"]): one["k_points_steps"] for one in claimed["artifacts"]}
    spec = chain_spec(plan.seed, enforced=points)
    return values_of(engine, spec, N_CHAINS, VALIDATOR.at_once)  # type: ignore[return-value]


def judge_answers(server: Server, plan: Plan, executed: list[Any]) -> list[dict[str, Any]]:
    """Returns for each answer the similarity, and the reason by both rules."""
    found = []
    for n, answer in enumerate(executed):
        ids = [int(one["token"]) for one in answer]
        validated = content(server.ask(known(question(plan.seed, n), ids)))
        verdicts = {
            name: chat_distance.compare(answer, validated, rules) for name, rules in RULES.items()
        }
        found.append(
            {
                "similarity": verdicts["others"].similarity,
                "reasons": {name: verdict.reason for name, verdict in verdicts.items()},
            }
        )
    return found


def hotter(server: Server, plan: Plan, _own: list[Any]) -> list[Any]:
    asked = [question(plan.seed, n, WRONG_TEMPERATURE) for n in range(N_ANSWERS)]
    return executors.answers(server, asked, VALIDATOR.at_once)


# Answers of cheats that have the model, made from the validator's answers.
LIARS: dict[str, Callable[[Server, Plan, list[Any]], list[Any]]] = {
    f"temperature {WRONG_TEMPERATURE:g} in place of {TEMPERATURE:g}": hotter,
    f"every {executors.SWAPPED_EVERY}th token swapped": lambda _server, _plan, own: [
        executors.with_swaps(one) for one in own
    ],
    "cut after 60 tokens": lambda _server, _plan, own: [deepcopy(one[:60]) for one in own],
}
CHAINED = [one.name for one in MACHINES if one is not VALIDATOR]
ANSWERED = [*(one.name for one in MACHINES), *LIARS]


def judge(model: Path, folder: Path, plan: Plan) -> None:
    """Computes and writes the validator's missing verdicts on chains and answers."""

    def lacking(part: str, names: list[str]) -> list[str]:
        judged = f"judged-{part}"
        wanted = names if part in plan.parts else []
        return [name for name in wanted if not path(folder, name, judged).exists()]

    chains, answered = lacking("chains", CHAINED), lacking("answers", ANSWERED)
    if not chains and not answered:
        return
    with engine_of(VALIDATOR, model, folder) as engine:
        for name in chains:
            found = judge_chains(engine, plan, read(folder, name, "chains"))
            write(path(folder, name, "judged-chains"), found)
        with patient(engine) as server:
            for name in answered:
                lie = LIARS.get(name)
                executed = read(folder, VALIDATOR.name if lie else name, "answers")
                executed = lie(server, plan, executed) if lie else executed
                write(path(folder, name, "judged-answers"), judge_answers(server, plan, executed))
