"""Names of workers: the host's and its GPUs'."""

from poc_core.serving.places import name_of, slot_of


def test_a_name_is_the_hosts_and_its_gpus_and_stays_over_starts() -> None:
    assert [slot_of(gpus, "cpu3") for gpus in ("0,1", "", "GPU-8f3a2b1c-77aa-11,MIG-0a")] == [
        "gpu0-1",
        "cpu3",
        "gpu8f3a2b1c-MIG-0a",
    ]
    assert name_of("host1/gpu0-1-3fa9c1") == name_of("host1/gpu0-1-77aa00") == "host1/gpu0-1"
    assert name_of("my-worker") == "my-worker"
