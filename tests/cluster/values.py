"""Values that operators give the chart: one set for each way to run a node in a cluster."""

from typing import Any

Values = dict[str, Any]

H200: Values = {
    "name": "h200",
    "gpus": 8,
    "tensorParallel": 2,
    "pipelineParallel": 2,
    "model": "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
    "replicas": 2,
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "engineArgs": ["--max-model-len", "8192"],
}
A100: Values = {"name": "a100", "replicas": 4, "options": ["--max-batch-tokens", "8192"]}
CPU: Values = {
    "name": "cpu",
    "gpus": 0,
    "model": "tiny-qwen3",
    "resources": {"requests": {"cpu": "2", "memory": "4Gi"}},
}

SETS: dict[str, Values] = {
    "defaults": {},
    "three kinds": {"workers": [H200, A100, CPU]},
    "a CPU alone, another registry": {
        "images": {"prefix": "registry.example/", "tag": "1.2.3", "pullSecrets": ["registry"]},
        "workers": [CPU],
    },
    "a Redis of theirs": {"redis": {"url": "redis://redis.example:6379/0"}},
    "a Redis of theirs with users": {"redis": {"url": "redis://redis.example:6379", "users": True}},
    "TLS to their Redis": {
        "redis": {"url": "rediss://redis.example:6379/0", "caSecret": "redis-ca"},
        "flower": {"enabled": True},
    },
    "Sentinels of theirs": {
        "redis": {
            "url": "redis+sentinel://sentinel.example:26379/theirs/0",
            "users": True,
            "sentinelPassword": True,
        },
        "flower": {"enabled": True},
    },
    "users in the chart's Redis": {
        "redis": {"users": True, "memory": "512mb", "storageClass": "fast"},
        "flower": {"enabled": True},
    },
    "no policies, no budgets": {"networkPolicies": False, "podDisruptionBudgets": False},
    "monitored": {
        "flower": {"enabled": True},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True},
            "dashboard": {"enabled": True, "datasource": "mine"},
        },
        "api": {"replicas": 3},
    },
    "autoscaled": {
        "monitoring": {"prometheus": "http://prometheus.monitoring:9090"},
        "workers": [{"name": "gpu", "autoscale": {"max": 16}}, CPU],
    },
    "mutual TLS, Ingress, keys": {
        "api": {
            "keysSecret": "keys",
            "mutualTls": {"secret": "tls"},
            "ingress": {"host": "node.example.org", "className": "nginx", "tlsSecret": "node"},
        },
        "courier": {"tlsSecret": "courier-tls"},
        "settings": {
            "POC_TRUSTED_NETWORKS": "10.9.0.0/16",
            "POC_CALLBACK_TLS_HOSTS": "aggregator.example.org",
        },
    },
    "one volume of models": {
        "workers": [{"name": "gpu", "replicas": 2, "cache": {"claim": "models"}}],
    },
    "an engine over two hosts": {
        "workers": [
            {
                "name": "pair",
                "gpus": 8,
                "hosts": 2,
                "tensorParallel": 16,
                "model": "moonshotai/Kimi-K2-Instruct",
                "sharedMemory": "64Gi",
            },
            {"name": "shared", "hosts": 2, "pipelineParallel": 2, "cache": {"claim": "models"}},
        ],
    },
    "priorities, settings, a model to be deployed": {
        "priorityClasses": {"create": True, "worker": "spare"},
        "settings": {"POC_CHAT_POLICY": "share:0.3", "POC_MAX_QUEUED_NONCES": "5000000"},
        "worker": {"model": "", "env": {"HTTPS_PROXY": "http://proxy.example:3128"}},
    },
}
