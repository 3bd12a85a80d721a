"""The list of planted faults: each public report that `docs/exactness.md` answers has one that a named test notices."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.learner import test_planted_objective_faults as objective
from tests.policy import test_planted_faults as tokens
from tests.test_check import FAULTS as OF_THE_COMMAND

# A fault: a test in tests/policy/test_planted_faults.py; a name in tests/learner/test_planted_objective_faults.py; a
# name in tests/test_check.py (with blanks); or a test that plants its own, with its file.
PLANTED: dict[str, tuple[str, ...]] = {
    # tokens, templates, masks
    "test_a_line_break_lost_after_the_end_of_a_turn_is_noticed": ("verl#6501", "verl#3720"),
    "test_taking_a_template_that_rewrites_history_for_one_that_appends_is_noticed": (
        "slime#2213", "SkyRL#178", "prime-rl#1361", "ART#726",
    ),
    "test_an_id_trained_twice_or_with_another_ones_advantage_is_noticed": ("slime#2213",),
    "test_a_mask_made_of_roles_is_noticed": ("SkyRL#710", "codescout#60", "Search-R1#21"),
    "test_a_mask_longer_than_the_ids_is_noticed": ("TRL#5144",),
    "test_ids_made_anew_from_text_are_noticed": ("TRL#5144",),
    "test_arguments_encoded_twice_are_noticed": ("verl#3960", "transformers#45419", "Qwen3#1894"),
    "test_a_call_that_is_dropped_is_noticed": ("verl#3759",),
    "test_results_in_another_order_than_the_calls_are_noticed": ("verl#3759",),
    "test_a_result_that_is_shortened_is_noticed": ("verl#4918", "verl#6313"),
    "test_a_result_that_just_fits_is_kept": ("verl#6309",),
    "test_a_parser_that_knows_calls_on_the_commentary_channel_only_is_noticed": ("vllm#35907", "vllm#28729"),
    "test_channels_rendered_anew_are_noticed": ("vllm#42454",),
    # objective and advantages
    "log_weights_are_summed_over_an_episode": ("TRL#5814", "TRL#5815", "NeMo-RL#2269"),
    "the sampler keeps only likely tokens": ("TRL#6789", "TRL#7269"),
    "the learner ignores the temperature": ("TRL#4159", "NeMo-RL#902", "prime-rl#697"),
    "a_micro_batch_divides_by_its_own_tokens": ("TRL#5619", "TRL#6024", "verl#906", "open-instruct#1137"),
    "a_micro_batch_divides_by_its_own_trajectories": ("verl#7321", "ms-swift#10117"),
    "every rank divides by its own tokens": ("verl#906", "TRL#6024"),
    "only the first row of an episode gets its advantage": ("SkyRL#1492", "SkyRL#1507"),
    "a_long_episode_votes_once_a_token": ("agent-lightning#444", "SkyRL#1278", "SkyRL#1529"),
    "a_row_is_taken_for_an_episode": ("SkyRL#1278",),
    "a_group_of_one_is_paid_its_reward": (),  # as verl 0.9.1 does: tests/peers/test_losses_against_verl.py
    "groups_without_advantage_count_in_the_denominators": ("TRL#6365",),
    "the_kl_is_divided_by_the_groups_that_teach": ("TRL#6368",),
    "a_broken_episode_counts_as_reward_0_in_the_baseline": ("verl#6452", "verl#6362", "NeMo-RL#2207", "TRL#6427"),
    "tests.learner.test_step:test_an_option_that_is_accepted_and_ignored_is_noticed": ("verl#7893", "TRL#6804"),
    "a_clip_range_has_one_width": ("verl#7893",),
    "k1_is_a_plain_loss": ("open-instruct#535",),
    "k3_is_not_bounded": ("TRL#3015", "TRL#6637"),
    "the_reference_is_scored_at_temperature_1": ("tinker-cookbook#689",),
    "dropout_is_left_on": ("TRL#3500",),
    "the optimizer is not restored": ("NeMo-RL#108", "ms-swift#9935"),
}  # fmt: skip


def test_every_report_that_the_document_answers_has_a_planted_fault() -> None:
    text = Path("docs/exactness.md").read_text(encoding="utf-8")
    answered = set(re.findall(r"[A-Za-z][\w-]*#\d+", text))
    planted = {report for reports in PLANTED.values() for report in reports}
    assert answered == planted


def test_every_planted_fault_is_there() -> None:
    for name in PLANTED:
        module, _, function = name.rpartition(":")
        if module:
            assert hasattr(importlib.import_module(module), function), name
        else:
            assert hasattr(tokens, name) or name in objective.FAULTS or name in OF_THE_COMMAND, name
