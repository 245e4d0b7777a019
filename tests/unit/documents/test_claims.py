"""README's "Why" and protocol.md name their tests: each claim has tests that fail when it breaks.

`WHY` names the tests of each sentence of README's section "Why"; its key is a part of the sentence.
`PROTOCOL` names the tests of each rule of docs/protocol.md. A rule is a section ("8.2"), a numbered
step of a section ("2.4" is step 4 of section 2), or a part that begins in bold ("5 Jobs").

Tests have unique names, so that a test may move to another file: `Class.function`, or `function`
outside a class. If a sentence or a rule is new, add its tests here. SECURITY.md's promises have the
marker `promise` instead.
"""

import ast
import re
from collections import Counter

from tests.harness.documents import ROOT

WHY = {
    "Chat goes first": (
        "TestYield.test_proofs_wait_for_the_last_request_and_then_go_on",
        "test_a_batch_waits_for_chat_and_completes_when_chat_ends",
    ),
    "neither refuses nor aborts chat": (
        "TestExclusive.test_other_policies_never_refuse",
        "test_a_round_under_other_policies_ends_no_answer",
    ),
    "under constant chat": (
        "TestEveryPolicy.test_without_chat_proofs_do_not_wait",
        "TestStarvation.test_then_proofs_get_their_share_however_late_a_slice_begins",
    ),
    "half of the engine's time": (
        "TestUrgent.test_they_have_half_of_the_time_from_the_first_on",
        "test_a_validation_has_its_share_of_the_engine_beside_constant_chat_at_once",
        "test_waiting_in_vain_is_503_and_the_job_is_cancelled",
    ),
    "Work survives crashes": (
        "test_a_dead_workers_lease_goes_to_the_next_that_asks_a_second_later",
        "test_a_courier_that_died_on_the_way_is_replaced",
        "TestKilled.test_worker",
        "TestKilled.test_redis",
    ),
    "are stored in Redis": (
        "test_the_round_outlives_the_api",
        "TestApi.test_that_is_killed_leaves_the_job_running_and_its_result_can_be_fetched_later",
        "test_a_restart_between_two_tries_loses_nothing",
    ),
    "still computed and counted once": (
        "test_a_lease_that_another_worker_took_over_counts_once",
        "test_completing_a_batch_twice_changes_nothing_and_the_last_still_asks_for_the_finish",
        "test_what_redis_forgot_of_a_round_is_computed_again_and_counted_once",
        "TestRedis.test_that_is_killed_costs_no_nonce",
    ),
    "form one node": (
        "test_two_workers_share_a_job_that_one_message_told_of",
        "test_every_ready_worker_of_the_model_is_told",
        "test_a_deployments_workers_fill_the_gpus",
        "test_a_host_that_joins_later_serves_it_too",
    ),
    "join and leave during a round": (
        "test_a_worker_looks_for_its_models_round_by_itself",
        "test_a_worker_that_is_to_end_finishes_what_it_has_in_hand_and_leaves_the_round_to_others",
    ),
    "too large for one host": (
        "test_an_engine_over_hosts_is_divided_among_them",
        "test_each_host_gets_its_part_of_the_engine",
        "test_chat_is_answered_over_both_hosts",
    ),
    "on other hardware": (
        "test_normal_is_the_cpus",
        "test_one_mismatch_in_a_hundred_is_no_fraud_but_two_are",
        "test_bfloat16_artifacts_lie_near_those_of_an_h200",
        "TestProofs.test_an_honest_other_engine_is_no_fraud",
    ),
    "CPUs and GPUs": (
        "test_values_are_the_cpus",
        "test_transformers_gives_the_same_artifacts",
        "TestFloat32.test_artifacts_are_the_references",
        "TestProofs.test_an_honest_other_engine_is_no_fraud",
    ),
    "by one forward pass": (
        "test_each_position_is_as_a_sampler_would_have_it",
        "test_a_pass_is_one_forward_and_no_step_for_each_token",
        "test_a_node_confirms_its_own_chat",
    ),
}

PROTOCOL = {
    "1": (
        "test_hashes_are_the_references_exactly",
        "test_normal_is_the_references_also_far_into_the_sequence",
    ),
    "1 seed(s)": ("test_seed_is_the_references",),
    "1 hash(i, seed)": (
        "test_hashes_are_the_references_exactly",
        "test_fast_hash_is_the_plain_one",
    ),
    "1 uniform(seed, n)": (
        "test_uniform_is_the_references",
        "test_uniform_rounds_the_hash_to_float32_before_dividing",
    ),
    "1 normal(seed, n)": (
        "test_normal_is_the_references_also_far_into_the_sequence",
        "test_a_hash_of_zero_gives_a_finite_normal",
    ),
    "1 inputs(nonce)": ("test_inputs_are_the_references",),
    "1 inputs(nonce) with `poc_stronger_rng`": (
        "test_inputs_are_the_references",
        "test_stronger_seeds_are_the_whole_digest",
        "test_stronger_inputs_smaller_than_eight_segments",
        "test_stronger_rng_changes_the_inputs",
    ),
    "2": ("test_a_body_is_recognised_by_its_marks", "test_an_artifact_round_is_what_its_body_says"),
    "2.1": (
        "test_token_ids_of_deepseek_v4s_vocabulary",
        "test_experts_chosen_by_token_get_the_ids_of_the_protocol",
        "TestFloat32.test_artifacts_are_the_references",
    ),
    "2.2": (
        "test_reflection_is_the_references",
        "test_layer_vectors_are_unit_vectors_named_by_layer",
        "test_layer_vectors_are_cast_after_they_are_normalised",
        "test_artifact_layers_are_reflected_in_the_models_dtype",
        "test_hyper_connections_have_their_first_two_outputs_reflected_and_nothing_else",
    ),
    "2 Reflected layers": (
        "test_what_the_networks_nodes_find_is_reflected",
        "test_wrapped_layers_are_found_and_not_reflected",
    ),
    "2.3": (
        "test_a_state_that_is_not_finite_is_excluded",
        "test_nonces_without_a_finite_state_are_excluded_and_named",
    ),
    "2.4": (
        "test_picks_are_the_references_in_its_order",
        "test_picking_one_dimension_picks_the_smallest_score",
    ),
    "2.5": (
        "test_rotation_is_the_references",
        "test_artifacts_are_unit_vectors_of_k_dim_numbers",
    ),
    "2.6": (
        "test_encodes_float16_little_endian_base64",
        "test_a_payload_of_artifacts_is_what_the_protocol_says",
    ),
    "2 Validation": (
        "test_the_threshold_itself_still_agrees",
        "test_fraud_only_below_the_fraud_threshold",
        "test_p_value_is_the_references",
        "test_the_networks_thresholds_are_those_of_the_code",
        "TestTermsOfAValidation.test_are_the_chains_where_it_names_none",
        "TestTermsOfAValidation.test_a_p_value_threshold_counts_where_it_is_honoured",
        "test_a_vector_that_cannot_be_read_is_a_mismatch",
        "test_twenty_of_two_hundred_may_stay_uncomputed_and_one_more_not",
    ),
    "3": (
        "test_a_body_is_recognised_by_its_marks",
        "test_a_distance_round_is_what_its_body_says",
        "test_who_transforms_layers_and_who_may_transform_a_sum",
        "TestFloat32.test_distances_are_the_references",
    ),
    "3.1": (
        "test_sign_flips_are_the_references",
        "test_layer_hooks_normalise_and_then_reflect",
        "test_layer_hooks_take_the_place_of_sign_flips",
        "test_a_distance_takes_the_steps_of_the_protocol",
    ),
    "3.2": (
        "test_nonce_reflections_are_the_references",
        "test_a_distance_takes_the_steps_of_the_protocol",
    ),
    "3.3": (
        "test_projection_is_the_references",
        "test_a_distance_takes_the_steps_of_the_protocol",
    ),
    "3.4": (
        "test_target_is_the_references",
        "test_a_distance_takes_the_steps_of_the_protocol",
        "test_only_distances_below_the_target_are_reported",
    ),
    "3 Fraud": (
        "test_what_makes_a_distance_invalid",
        "test_one_invalid_distance_of_one_is_a_fraud",
        "test_no_distances_are_no_fraud",
        "test_excluded_distances_are_not_judged",
    ),
    "3 Records": ("test_a_batch_is_judged_by_the_rounds_r_target",),
    "4": (
        "test_follows_the_formula_of_the_protocol",
        "test_the_nonces_are_those_of",
        "test_a_lease_that_another_worker_took_over_counts_once",
        "test_ends_at_the_largest_nonce",
    ),
    "5": (
        "test_unknown_fields_outside_params_are_ignored",
        "test_422_says_where_and_what_for",
        "test_an_empty_url_means_no_callback",
        "test_what_an_artifact_body_leaves_out_has_the_protocols_defaults",
    ),
    "5 States": (
        "test_the_states_are_those_of_the_protocol",
        "test_409_while_a_round_generates",
        "test_the_status_says_that_a_sequence_has_ended",
        "test_stop_leaves_what_is_under_way_and_what_is_waited_for",
    ),
    "5 Jobs": (
        "test_while_a_round_generates_its_models_batches_wait",
        "test_batches_hold_the_nonces_in_order_and_exactly",
        "test_a_finished_job_leaves_only_its_hash_for_the_result_ttl",
        "test_422_says_where_and_what_for",
    ),
    "5 Results": (
        "test_the_result_lists_artifacts_in_the_order_of_the_request",
        "test_excluded_nonces_are_left_out_and_listed",
        "test_a_validation_answers_with_a_verdict",
        "test_a_verdict_tells_the_distances_it_rests_on",
    ),
    "5 Rounds": (
        "test_a_lease_is_what_the_engine_holds_whatever_the_rounds_batch_size",
        "test_422_says_where_and_what_for",
        "test_a_distance_client_names_no_model_unless_there_are_several",
        "test_a_batch_is_judged_by_the_rounds_r_target",
    ),
    "5 GET /status": (
        "test_the_status_shows_a_rounds_config_in_its_own_words",
        "test_the_status_before_any_round_has_every_field_that_it_has_after",
        "test_what_the_status_does_not_list_is_had_page_by_page",
        "test_a_stopped_round_waits_for_what_living_workers_have_in_hand",
    ),
    "5 Errors": (
        "test_openapi_names_every_error_of",
        "test_409_names_what_is_requested_and_what_is_deployed",
        "test_waiting_in_vain_is_503_and_the_job_is_cancelled",
        "test_429_when_the_queue_is_full",
    ),
    "5 The network node": (
        "test_a_start_is_answered_with_one_result_per_worker",
        "test_backends_that_differ_are_mixed",
        "test_a_stop_is_answered_with_one_result_per_worker_and_all_are_idle",
        "test_a_round_whose_only_worker_is_being_replaced_has_not_failed",
    ),
    "5 Deployments": (
        "test_every_route_answers_under_a_version",
        "test_up_while_a_model_starts_or_runs_is_409",
        "test_the_state_is_inference_also_during_a_round",
        "test_stop_of_a_load_answers_at_once_and_the_very_same_up_goes_on",
    ),
    "5 Further paths": (
        "test_redis_away_leaves_livez_alone",
        "test_readiness_ends_with_the_last_sign_of_life",
        "TestChoice.test_unknown_model_is_404_and_lists_those_served",
        "test_a_round_under_exclusive_ends_whole_answers_with_503",
    ),
    "6": (
        "test_a_payload_stays_the_same_over_failures_whatever_is_added",
        "test_what_is_too_large_goes_in_smaller_ones_and_nothing_is_lost_or_doubled",
        "test_the_wait_after_a_failure_doubles_from_1_to_30_seconds",
        "test_410_ends_a_delivery_and_all_that_would_follow",
    ),
    "7": ("test_the_names_that_operators_know_are_read",),
    "8": (
        "test_a_body_is_recognised",
        "test_params_that_are_refused",
        "test_what_a_model_cannot_do",
        "test_stronger_inputs_are_not_asked_for",
    ),
    "8 step_seed(t, k, salt)": (
        "test_base_seeds_are_the_references",
        "test_step_seeds_are_the_references",
    ),
    "8 Codebook": (
        "test_what_ships_is_what_the_golden_data_was_made_with",
        "test_the_networks_file_takes_its_place",
    ),
    "8.1": (
        "test_a_prefill_in_parts_gives_the_chains_of_one_at_once",
        "TestChains.test_they_are_the_references",
    ),
    "8.1.1": (
        "TestChains.test_they_are_the_references",
        "test_a_prefill_has_the_inputs_of_its_nonces_and_the_point_of_its_last_row",
    ),
    "8.1.2": ("TestChains.test_they_are_the_references", "test_inputs_of_steps_are_the_references"),
    "8.1.3": (
        "test_reflections_of_a_nonces_own_are_the_references",
        "test_vectors_of_each_nonces_own_are_none_of_the_batch",
        "test_wrapped_layers_are_reflected_in_chains_and_not_in_artifacts",
    ),
    "8.1.4": (
        "test_a_prefill_has_the_inputs_of_its_nonces_and_the_point_of_its_last_row",
        "test_the_prefills_picks_are_the_references",
        "test_a_steps_picks_are_the_references",
        "test_snaps_are_the_references",
        "test_of_several_best_points_the_lowest_is_taken",
        "test_a_state_that_is_not_finite_has_no_point",
    ),
    "8.2": (
        "test_experts_are_the_references",
        "test_forced_logits_are_the_references",
        "test_layers_of_experts_are_counted_over_the_whole_model",
    ),
    "8.2 Token ids": (
        "test_token_ids_of_steps_are_the_references",
        "test_gates_that_route_by_token_keep_their_logits_and_are_not_counted",
    ),
    "8.3": (
        "test_claims_are_judged_in_one_pass_as_step_by_step",
        "test_margins_of_claims_are_the_references",
        "test_verdicts_are_the_references",
        "test_the_threshold",
    ),
    "9": ("test_a_node_confirms_its_own_chat",),
    "9.1": (
        "test_no_foreign_id_reaches_the_engine",
        "test_more_tokens_than_the_context_has_judge_nobody",
        "test_what_cannot_be_read_is_refused_and_judges_who_gave_it",
        "test_a_text_wins",
    ),
    "9.1 Tokens are decimal ids": (
        "test_ordinary_requests_are_named_by_ids_where_the_deployment_says_so",
    ),
    "9.1 Raw": (
        "test_raw_ones_know_nothing_of_the_sampler",
        "test_each_position_is_as_a_sampler_would_have_it",
        "test_the_engines_rules_end_it",
    ),
    "9.2": (
        "test_the_networks_examples_to_the_last_digit",
        "test_an_answer_that_is_too_far_is_invalid",
        "test_the_models_rules",
        "test_a_few_tokens_may_be_outside_what_the_sampler_gives",
        "test_claimed_tokens_may_be_three_more",
    ),
}


def sentences() -> list[str]:
    """Returns the sentences of README's section "Why", without marks and links."""
    why = (ROOT / "README.md").read_text().split("\n## Why\n")[1].split("\n## ")[0]
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)|\*\*|^\* ", r"\1", why, flags=re.MULTILINE)
    return re.findall(r"\S.*?[.!?](?=\s)", plain, flags=re.DOTALL)


def rules() -> list[str]:
    """Returns the numbers or names of the rules of docs/protocol.md, in order."""
    found, section = [], ""
    for line in (ROOT / "docs/protocol.md").read_text().splitlines():
        if line.startswith("#"):
            heading = re.match(r"#+ (\d[\d.]*\d|\d)", line)
            section = heading[1] if heading else ""
            found.append(section)
        elif step := re.match(r"(\d+)\. ", line):
            found.append(f"{section}.{step[1]}")
        elif bold := re.match(r"(?: *\* )?\*\*(.+?)[.:]?\*\*", line):
            found.append(f"{section} {bold[1]}")
    return [rule for rule in found if rule]


def defined() -> Counter[str]:
    """Returns the names of all tests, and how many tests have each name."""
    names: Counter[str] = Counter()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for one in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                    names[owner + one.name] += 1
    return names


def test_each_sentence_of_the_readmes_why_names_its_tests() -> None:
    keys = [[key for key in WHY if key in sentence] for sentence in sentences()]
    assert sorted(keys) == sorted([key] for key in WHY)


def test_each_rule_of_the_protocol_names_its_tests() -> None:
    assert sorted(rules()) == sorted(PROTOCOL)


def test_each_named_test_exists_once() -> None:
    names = defined()
    claims = [*WHY.items(), *PROTOCOL.items()]
    wrong = [(claim, test) for claim, tests in claims for test in tests if names[test] != 1]
    assert wrong == []
