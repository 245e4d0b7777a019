"""/api/v1/metrics: schema v1, as the network's monitoring reads it."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import fakeredis
import pytest
from fastapi.testclient import TestClient
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from api.app import create_app
from api.node_metrics.exposition import MOST_BYTES, MOST_SERIES
from api.node_metrics.families import ALL, ENGINE
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from api.version import VERSION
from poc_core.errors import SettingsError
from poc_core.machine_figures import CpuTimes, GpuFigures, MachineFigures
from poc_core.records import ModelInfo, WorkerRecord
from poc_core.serving.deployments import Deployment, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import RecordingDispatcher
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Call, FakeWorker
from tests.vllm_metrics import metrics_text

PATH = "/api/v1/metrics"
HOSTS_NAME = "gpu-17.example.internal"
Start = Callable[..., WorkerRecord]


def tells(text: str) -> Callable[[Call], None]:
    def behave(call: Call) -> None:
        assert call.received.line == "GET /metrics HTTP/1.1"
        call.answer(text.encode())

    return behave


@pytest.fixture(autouse=True)
def engines_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is; tests of EngineReadings have late ones."""
    monkeypatch.setattr("api.node_metrics.engines.DEADLINE_S", 60.0)


@pytest.fixture
def start(workers: WorkerRegistry) -> Iterator[Start]:
    """Starts and registers a worker with a vLLM."""
    with contextlib.ExitStack() as stack:

        def start(worker_id: str = "w1", text: str | None = None, **changes: Any) -> WorkerRecord:
            model = changes.get("model", "tiny-qwen3")
            told = tells(metrics_text(model) if text is None else text)
            worker = stack.enter_context(FakeWorker(worker_id, told, model))
            record = replace(worker.record, host=HOSTS_NAME, engine="vllm", **changes)
            workers.heartbeat(record)
            return record

        yield start


@pytest.fixture
def store(redis: Redis, settings: Settings) -> DeploymentStore:
    return DeploymentStore(redis, settings)


def machine(host: str = HOSTS_NAME, *gpus: GpuFigures, **sensors: float) -> MachineFigures:
    return MachineFigures(host=host, read_at=1700000000.5, gpus=gpus, sensors=sensors)


def tell(store: DeploymentStore, *machines: MachineFigures) -> None:
    for index, one in enumerate(machines):
        report = HostReport(
            id=f"h{index}", host=one.host, state=HostState.IDLE, generation=0, vllm_version="0.32.0"
        )
        store.report(report)
        store.store_machine(report.id, one)


def families(client: TestClient) -> dict[str, Metric]:
    answer = client.get(PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    return {one.name: one for one in text_string_to_metric_families(answer.text)}


def told_by(client: TestClient, family: str) -> list[tuple[dict[str, str], float]]:
    return [(sample.labels, sample.value) for sample in families(client)[family].samples]


def replicas(client: TestClient) -> set[str]:
    return {labels["replica"] for labels, _ in told_by(client, "vllm:num_requests_running")}


def labels_of(client: TestClient) -> list[tuple[str, str, str]]:
    samples = (sample for family in families(client).values() for sample in family.samples)
    return [(sample.name, *label) for sample in samples for label in sample.labels.items()]


def test_a_node_without_engines_tells_its_schema(client: TestClient) -> None:
    found = families(client)
    assert found.keys() == {"gonka_metrics_schema_info", "mlnode_version_info"}
    (sample,) = found["gonka_metrics_schema_info"].samples
    assert (sample.labels, sample.value) == ({"version": "1"}, 1)


def test_of_an_engine_just_the_families_of_the_schema_are_told_with_their_model_and_replica(
    client: TestClient, start: Start
) -> None:
    start()
    text = client.get(PATH).text
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert {name for name in told if name.startswith("vllm:")} == {family.name for family in ENGINE}
    assert told <= {family.name for family in ALL}
    assert "_created" not in text
    found = families(client)
    for family in ENGINE:
        # The parser names the families of counters so.
        shown = found[family.name.removesuffix("_total" if family.kind == "counter" else "")]
        assert shown.type == family.kind
        for sample in shown.samples:
            assert {"model_name": "tiny-qwen3", "replica": "0"}.items() <= sample.labels.items()
            assert "engine" not in sample.labels
    success = told_by(client, "vllm:request_success")
    ended = {labels["finished_reason"]: value for labels, value in success}
    assert ended.keys() == {"stop", "length", "abort", "error", "repetition"}
    assert ended["length"] == 1


def test_engines_that_are_ready_keep_their_number_while_another_is_not(
    client: TestClient, start: Start
) -> None:
    for name, state in {"a": "ready", "b": "starting", "c": "ready"}.items():
        start(name, state=state)
    assert replicas(client) == {"0", "2"}
    ((config, _),) = told_by(client, "mlnode_config_info")
    assert config["replicas"] == "2"


def test_every_engine_says_from_when_its_data_is(client: TestClient, start: Start) -> None:
    start("a")
    start("b", stats={"engine_still_since": 1234.5})
    start("c", port=None)
    found = told_by(client, "mlnode_source_scrape_timestamp_seconds")
    at = {(labels["source"], labels["replica"]): value for labels, value in found}
    assert at.keys() == {("vllm", "0"), ("vllm", "1")}
    assert at["vllm", "0"] > 1.7e9
    assert at["vllm", "1"] == 1234.5  # its server answers, and the engine behind it hangs


def test_an_engine_that_hangs_is_shown_as_it_was_last(
    client: TestClient, start: Start, workers: WorkerRegistry
) -> None:
    record = start(stats={"engine_still_since": 1234.5})
    workers.heartbeat(replace(record, state="hung"))
    assert replicas(client) == {"0"}
    ((_, at),) = told_by(client, "mlnode_source_scrape_timestamp_seconds")
    assert at == 1234.5


def test_a_worker_that_does_not_know_the_path_is_left_out(
    client: TestClient, start: Start, workers: WorkerRegistry
) -> None:
    start("a")
    with FakeWorker("b", lambda call: call.answer(b"{}", "404 Not Found")) as old:
        workers.heartbeat(replace(old.record, engine="vllm"))
        assert replicas(client) == {"0"}


class TestLabels:
    """No path, name of a host, address or port in any."""

    SECRETS = (
        *("/data/models/secret", HOSTS_NAME, "10.1.2.3:8000", "10.1.2.3"),
        *("http://hub/x", "~/cache", r"C:\x"),
    )

    def test_of_vllm_say_words_and_numbers(self, client: TestClient, start: Start) -> None:
        evil = "".join(f',x{index}="{value}"' for index, value in enumerate(self.SECRETS))
        said = f'cache_dtype="auto"{evil}'.replace("\\", "\\\\")
        start(text=metrics_text().replace('cache_dtype="auto"', said))
        ((labels, _),) = told_by(client, "vllm:cache_config_info")
        told = {name: value for name, value in labels.items() if re.fullmatch(r"x\d", name)}
        assert told == {f"x{index}": "" for index in range(len(self.SECRETS))}
        assert (labels["cache_dtype"], labels["gpu_memory_utilization"]) == ("auto", "0.92")

    def test_say_nothing_of_the_places_where_the_node_runs(
        self, client: TestClient, start: Start, store: DeploymentStore
    ) -> None:
        power = {"power_draw_watts": 312.5}
        gpu = GpuFigures(uuid="GPU-1", model="NVIDIA H200", sensors=power, xid_events={79: 1})
        tell(store, machine(HOSTS_NAME, gpu, memory_used_bytes=5.0))
        record = start(model="/data/models/secret")
        start("b", model="org/name")
        found = labels_of(client)
        for name, label, value in found:
            assert HOSTS_NAME not in value
            assert str(record.port) not in value
            assert not re.search(r"\d+\.\d+\.\d+\.\d+|^[/.~]|\\|:", value), (name, label, value)
            assert "/" not in value or (label, value) == ("model_name", "org/name")
        assert "mlnode_gpu_power_draw_watts" in {name for name, _, _ in found}
        models = {value for _, label, value in found if label == "model_name"}
        assert models == {"secret", "org/name"}


class TestMachines:
    def test_a_sensor_that_is_not_there_has_no_series(
        self, client: TestClient, store: DeploymentStore
    ) -> None:
        both = {"temp_core_celsius": 61.0, "power_draw_watts": 312.5}
        first = GpuFigures(uuid="GPU-1", model="NVIDIA H200", sensors=both)
        second = GpuFigures(uuid="GPU-2", model="NVIDIA H200", sensors={"temp_core_celsius": 58})
        tell(store, machine(HOSTS_NAME, first, second, memory_limit_bytes=2.0**40))
        found = families(client)
        temperatures = told_by(client, "mlnode_gpu_temp_core_celsius")
        assert temperatures == [
            ({"gpu_index": "0", "gpu_model": "NVIDIA H200"}, 61),
            ({"gpu_index": "1", "gpu_model": "NVIDIA H200"}, 58),
        ]
        (power,) = found["mlnode_gpu_power_draw_watts"].samples
        assert (power.labels["gpu_index"], power.value) == ("0", 312.5)
        assert told_by(client, "mlnode_host_memory_limit_bytes") == [({}, 2**40)]
        assert "mlnode_host_memory_used_bytes" not in found
        assert "mlnode_gpu_xid_events" not in found
        read_at = told_by(client, "mlnode_source_scrape_timestamp_seconds")
        sources = {labels["source"]: value for labels, value in read_at}
        assert sources == dict.fromkeys(("host", "nvml"), 1700000000.5)

    def test_faults_of_a_gpu_are_told_by_their_kind(
        self, client: TestClient, store: DeploymentStore
    ) -> None:
        faulty = GpuFigures(uuid="GPU-1", model="X", sensors={}, xid_events={79: 1, 31: 4})
        tell(store, machine("a", faulty))
        assert told_by(client, "mlnode_gpu_xid_events") == [
            ({"gpu_index": "0", "xid": "31"}, 4),
            ({"gpu_index": "0", "xid": "79"}, 1),
        ]

    def test_of_several_hosts_every_gpu_is_told_once_and_hosts_by_number(
        self, client: TestClient, store: DeploymentStore
    ) -> None:
        def gpu(uuid: str) -> GpuFigures:
            return GpuFigures(uuid=uuid, model="X", sensors={"power_draw_watts": 1})

        tell(
            store,
            machine("b", gpu("2"), gpu("3"), memory_used_bytes=2),
            machine("a", gpu("1"), memory_used_bytes=1),
        )
        power = told_by(client, "mlnode_gpu_power_draw_watts")
        assert [labels["gpu_index"] for labels, _ in power] == ["0", "1", "2"]
        memory = told_by(client, "mlnode_host_memory_used_bytes")
        assert memory == [({"host_index": "0"}, 1), ({"host_index": "1"}, 2)]


def test_the_names_are_those_that_the_network_allows() -> None:
    """Its dashboards and alerts are made of these; others are dropped on the way."""
    gpu = """temp_core_celsius temp_hbm_celsius power_draw_watts power_limit_watts sm_clock_hertz
        sm_clock_max_hertz clocks_event_reasons memory_used_bytes memory_free_bytes ecc_dbe_total
        pcie_replay_total xid_events_total"""
    host = "cpu_busy_ratio cpu_steal_ratio memory_used_bytes memory_limit_bytes hf_cache_free_bytes"
    ours = {
        *(f"mlnode_gpu_{name}" for name in gpu.split()),
        *(f"mlnode_host_{name}" for name in host.split()),
        "mlnode_version_info",
        "mlnode_config_info",
        "mlnode_source_scrape_timestamp_seconds",
        "gonka_metrics_schema_info",
    }
    kinds = {family.name: family.kind for family in ALL if family not in ENGINE}
    assert kinds.keys() == ours
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {name for name in ours if name.endswith("_total")}


class TestCpuShares:
    @staticmethod
    def tell(store: DeploymentStore, busy: float, steal: float, whole: float) -> None:
        cpu = CpuTimes(busy=busy, steal=steal, all=whole)
        tell(store, machine("a").model_copy(update={"cpu": cpu}))

    @pytest.fixture
    def shares(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], list[float]]:
        page = client.app.state.services.node_metrics  # type: ignore[attr-defined]
        monkeypatch.setattr(page, "_fresh_s", -1.0)

        def read() -> list[float]:
            found = families(client)
            names = ("mlnode_host_cpu_busy_ratio", "mlnode_host_cpu_steal_ratio")
            return [found[name].samples[0].value for name in names if name in found]

        return read

    def test_they_are_of_the_time_between_two_scrapes(
        self, store: DeploymentStore, shares: Callable[[], list[float]]
    ) -> None:
        self.tell(store, 1000, 10, 2000)
        assert shares() == []
        self.tell(store, 1060, 14, 2100)
        assert shares() == [0.6, 0.04]
        assert shares() == [0.6, 0.04]  # the host has not reported since
        self.tell(store, 1060, 14, 2200)
        assert shares() == [0, 0]

    def test_a_host_that_was_booted_again_has_none(
        self, store: DeploymentStore, shares: Callable[[], list[float]]
    ) -> None:
        self.tell(store, 1000, 10, 2000)
        shares()
        self.tell(store, 5, 0, 10)
        assert shares() == []
        self.tell(store, 10, 0, 20)
        assert shares() == [0.5, 0]


def test_the_configuration_is_told_as_far_as_it_is_known(
    client: TestClient, start: Start, store: DeploymentStore
) -> None:
    tell(store, machine())
    store.deploy(Deployment(model="tiny-qwen3", tensor_parallel=2))
    start(info=ModelInfo("tiny-qwen3", 128, 4, 2048, 8192, "bfloat16", max_sequences=608))
    ((config, _),) = told_by(client, "mlnode_config_info")
    model = {"model_name": "tiny-qwen3", "dtype": "bfloat16", "max_model_len": "2048"}
    engines = {"replicas": "1", "max_num_seqs": "608"}
    parts = {"tensor_parallel_size": "2", "pipeline_parallel_size": ""}
    assert config == model | engines | parts
    assert told_by(client, "mlnode_version_info") == [({"version": VERSION}, 1)]


def test_64_engines_are_within_what_the_network_reads(
    client: TestClient, start: Start, store: DeploymentStore
) -> None:
    prefix = "mlnode_gpu_"
    names = [one.name.removeprefix(prefix) for one in ALL if one.name.startswith(prefix)]
    sensors = dict.fromkeys(names, 1.5)
    gpus = [GpuFigures(uuid=f"{gpu}", model="X", sensors=sensors) for gpu in range(64)]
    tell(store, *(machine(f"h{host}", *gpus[8 * host : 8 * host + 8]) for host in range(8)))
    for index in range(64):
        start(f"w{index:02}", model="deepseek-ai/DeepSeek-V4-Flash-0731")
    wait_until(
        lambda: client.get(PATH).text.count("vllm:num_requests_running{") == 64, "all engines"
    )
    answer = client.get(PATH)
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    samples = [sample for one in found.values() for sample in one.samples]
    series = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
    assert len(set(series)) == len(series) <= MOST_SERIES
    assert len(answer.content) <= MOST_BYTES
    assert replicas(client) == {str(i) for i in range(64)}
    assert len(found["mlnode_gpu_pcie_replay"].samples) == 64
    for family in (one for one in ENGINE if one.kind == "histogram"):
        of_engines: dict[str, dict[str, float]] = {}
        for sample in found[family.name].samples:
            bounds = of_engines.setdefault(sample.labels["replica"], {})
            bounds[sample.labels.get("le", sample.name.removeprefix(family.name))] = sample.value
        assert len({frozenset(bounds) for bounds in of_engines.values()}) == 1
        assert len(of_engines) == 64
        for bounds in of_engines.values():
            assert bounds["+Inf"] == bounds["_count"]
            assert len(bounds) > 4  # more than the last of them, the sum and the count


@pytest.mark.parametrize(
    ("chosen", "code"), [("full", 200), ("", 200), (" FULL ", 200), ("off", 404)]
)
def test_it_is_there_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, chosen: str, code: int
) -> None:
    monkeypatch.setenv("GONKA_METRICS", chosen)
    assert status() == code


def test_another_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONKA_METRICS", "some")
    with pytest.raises(SettingsError, match="GONKA_METRICS: must be full or off, not 'some'"):
        status()


def test_without_redis_it_is_503() -> None:
    assert status(Redis(port=1, retry=Retry(NoBackoff(), 0))) == 503


def status(redis: Redis | None = None) -> int:
    services = Services(
        Settings(), redis or fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher())
    )
    with TestClient(create_app(services=services)) as client:
        return client.get(PATH).status_code
