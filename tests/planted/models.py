"""Faults of models in vLLM's workers: see tests/integration/engines/test_planted_models.py."""

from typing import Any

from workers.vllm.extension import ProofExtension

# workers.vllm.forward.kv_isolation's, which may not be imported before vLLM has chosen a device
FIRST_BLOCK = 1


class ReadingExtension(ProofExtension):
    """An extension whose last layer also reads the first one's cache, and tells nobody."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        if not hasattr(runner, "planted"):
            first, last = (runner._layers[index].self_attn.attn for index in (0, -1))
            (group,) = runner._caches.groups

            def read(_module: Any, _args: Any, output: Any) -> Any:
                # The first block of the first sequence: full, where that has so many tokens.
                found = first.kv_cache.select(group.block_dim, FIRST_BLOCK)
                return output * (1 + found.abs().mean())

            runner.planted = last.register_forward_hook(read)
        return runner


class PartialSumsExtension(ProofExtension):
    """An extension whose layers leave their last sum to the next one, as sparse attention's do."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        for layer in runner._layers:
            layer.mlp.down_proj.reduce_results = False
        return runner


class ForgettingExtension(ProofExtension):
    """An extension whose linear attention finds other sequences' states at each step."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        if not hasattr(runner, "planted"):
            runner.planted = runner._whereabouts.of

            def of(held: Any, step: int) -> Any:
                found = runner.planted(held, step)
                if held.place is not None and held.batch.order.is_step(step):
                    for group in runner._kept.groups:
                        for name in group.layer_names if group.is_state else ():
                            for cache in held.place.caches[name]:
                                cache.copy_(cache.roll(1, 0))
                return found

            runner._whereabouts.of = of
        return runner
