"""Which terms hold where a request names none, or only some."""

from typing import Any

import pytest

from poc_core.schemes.artifact.requests import GenerateBody, ReceivedStatTest
from poc_core.schemes.artifact.terms import network_terms


class TestTermsOfAValidation:
    """What a request leaves out is the network's, unless it names a dist_threshold."""

    @pytest.mark.parametrize(
        ("model", "stat_test", "terms"),
        [
            ("llama", None, (0.4, 0.1, 0.05, "the network's default")),
            ("llama", {}, (0.4, 0.1, 0.05, "the network's default")),
            (
                "MiniMaxAI/MiniMax-M2.7",
                None,
                (0.75, 0.1, 0.05, "the network's for MiniMaxAI/MiniMax-M2.7"),
            ),
            (
                "deepseek-ai/DeepSeek-V4-Flash-0731",
                None,
                (0.41, 0.1, 0.05, "the network's for deepseek-ai/DeepSeek-V4-Flash-0731"),
            ),
            (
                "zai-org/GLM-5.3-Flash",
                {"p_mismatch": 0.003},
                (
                    0.44,
                    0.003,
                    0.05,
                    "the network's for zai-org/GLM-5.3-Flash, but p_mismatch the request's",
                ),
            ),
            ("llama", {"dist_threshold": 0.3}, (0.3, 0.001, 0.01, "the request")),
            (
                "llama",
                {"dist_threshold": 0.4, "p_mismatch": 0.1, "fraud_threshold": 0.05},
                (0.4, 0.1, 0.05, "the request"),
            ),
        ],
        ids=str,
    )
    def test_are_the_chains_where_it_names_none(
        self, model: str, stat_test: dict[str, float] | None, terms: tuple[Any, ...]
    ) -> None:
        asked = GenerateBody.model_validate(
            {
                "block_hash": "b",
                "block_height": 1,
                "node_id": 0,
                "node_count": 1,
                "public_key": "k",
                "nonces": [0],
                "params": {"model": model, "seq_len": 64},
                "stat_test": stat_test,
            }
        )
        found = asked.terms(honour_p_value_threshold=False)
        names = ("dist_threshold", "p_mismatch", "fraud_threshold", "source")
        assert tuple(found[name] for name in names) == terms

    def test_a_p_value_threshold_counts_where_it_is_honoured(self) -> None:
        asked = ReceivedStatTest(p_value_threshold=0.2)
        usual = network_terms("llama")
        assert asked.applied(True, usual).fraud_threshold == 0.2
        assert asked.applied(False, usual).fraud_threshold == 0.05
