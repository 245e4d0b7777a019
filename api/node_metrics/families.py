"""The metric families of the network's schema v1. docs/api.md has a table of mlnode_ families."""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    name: str  # a counter's name ends in _total, as in Prometheus' text format 0.0.4
    kind: Kind
    about: str

    @property
    def sample_names(self) -> tuple[str, ...]:
        endings = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.name + ending for ending in endings)


SCHEMA = Family("gonka_metrics_schema_info", "gauge", "The version of this schema.")
CONFIG = Family("mlnode_config_info", "gauge", "Configuration of the engines; empty: not given.")
RELEASE = Family("mlnode_version_info", "gauge", "The release of this node.")
READ_AT = Family(
    "mlnode_source_scrape_timestamp_seconds",
    "gauge",
    "Unix time of a source's data; constant while an engine hangs.",
)

# Families of each engine, in the order of the text: the last ones are omitted first.
ENGINE = (
    Family("vllm:num_requests_running", "gauge", "Requests in the engine's batches."),
    Family("vllm:num_requests_waiting", "gauge", "Requests that wait for the engine."),
    Family("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all."),
    Family(
        "vllm:num_preemptions_total", "counter", "Requests preempted because the cache was full."
    ),
    Family("vllm:prompt_tokens_total", "counter", "Prompt tokens."),
    Family("vllm:generation_tokens_total", "counter", "Tokens generated."),
    Family("vllm:request_success_total", "counter", "Requests that ended, by reason."),
    Family("vllm:prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache."),
    Family("vllm:prefix_cache_hits_total", "counter", "Tokens found there."),
    Family("vllm:iteration_tokens_total", "histogram", "Tokens of a step of the engine."),
    Family("vllm:time_to_first_token_seconds", "histogram", "From a request to its first token."),
    Family("vllm:inter_token_latency_seconds", "histogram", "From a token to the next."),
    Family("vllm:e2e_request_latency_seconds", "histogram", "From a request to its end."),
    Family("vllm:request_queue_time_seconds", "histogram", "Time of a request in the queue."),
    Family("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request."),
    Family("vllm:request_generation_tokens", "histogram", "Tokens generated for a request."),
    Family("vllm:cache_config_info", "gauge", "The engine's settings of its KV cache."),
)
XID_EVENTS = Family(
    "mlnode_gpu_xid_events_total",
    "counter",
    "Faults reported by the driver, by XID.",
)
GPU = (
    Family("mlnode_gpu_temp_core_celsius", "gauge", "Temperature of the core."),
    Family("mlnode_gpu_memory_used_bytes", "gauge", "Memory in use."),
    Family("mlnode_gpu_memory_free_bytes", "gauge", "Memory that is free."),
    Family("mlnode_gpu_power_draw_watts", "gauge", "Power drawn."),
    Family("mlnode_gpu_power_limit_watts", "gauge", "Power limit."),
    Family("mlnode_gpu_sm_clock_hertz", "gauge", "Clock of the multiprocessors."),
    Family("mlnode_gpu_sm_clock_max_hertz", "gauge", "Highest clock of the multiprocessors."),
    Family(
        "mlnode_gpu_clocks_event_reasons",
        "gauge",
        "NVML's bit mask of reasons that limit the clock.",
    ),
    Family("mlnode_gpu_ecc_dbe_total", "counter", "Uncorrected memory errors."),
    Family("mlnode_gpu_temp_hbm_celsius", "gauge", "Temperature of the memory."),
    Family("mlnode_gpu_pcie_replay_total", "counter", "PCIe packets sent again."),
)
HOST = (
    Family(
        "mlnode_host_cpu_busy_ratio", "gauge", "Share of CPU time at work since the last scrape."
    ),
    Family(
        "mlnode_host_cpu_steal_ratio",
        "gauge",
        "Share of CPU time taken by other virtual machines since the last scrape.",
    ),
    Family("mlnode_host_memory_used_bytes", "gauge", "Memory in use, of the container."),
    Family("mlnode_host_memory_limit_bytes", "gauge", "Memory limit of the container."),
    Family("mlnode_host_hf_cache_free_bytes", "gauge", "Free space on the model cache's disk."),
)
ALL = (
    SCHEMA,
    RELEASE,
    CONFIG,
    READ_AT,
    *HOST,
    XID_EVENTS,
    *ENGINE[:9],
    *GPU[:4],
    *ENGINE[9:],
    *GPU[4:],
)
