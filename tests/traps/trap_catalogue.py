"""Bugs found in Metta AI's trainer, each with the measurement that it fails and Holdfast passes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from traps import memory_traps, training_traps

METTA = "Metta, August 2025"


@dataclass(frozen=True)
class Trap:
    """One way for a trainer to go wrong: what happens, where it did, and how it is measured here."""

    number: int
    name: str
    story: str
    reported_in: str
    caught: str
    """The law that it breaks, or what prevents it."""
    size: str
    """What is measured, in words."""
    measure: Callable[[], float]
    """How much is wrong in the library as it is now."""
    sprung: Callable[[], AbstractContextManager]
    """Puts the bug into our own code."""
    bound: float = 0.0
    """More than this is wrong."""

    @property
    def test(self):
        """The name of its test."""
        return f"test_trap_{self.number:02d}_{self.name.replace(' ', '_').replace(chr(39), '')}"


TRAPS = [
    Trap(
        1,
        "memory wiped at the rollout's start",
        "All hidden states are cleared before every rollout, in the middle of episodes. An agent with "
        "rollouts of 64 steps learns in episodes of 1,000 steps to remember no longer than that.",
        f"{METTA}: the trainer cleared every hidden state when a rollout began, and again before every "
        "minibatch; a fix elsewhere reintroduced it in October. PufferLib 3.0 does it too.",
        "carry",
        "share of agents that start a rollout with zero state, in a run",
        memory_traps.share_of_agents_with_zero_state_at_rollout_start,
        memory_traps.wiped_at_the_rollouts_start,
    ),
    Trap(
        2,
        "zero start in training",
        "The rollout carried a state into the segment; the update replays it from zeros. Old and new "
        "log-probs come from different hidden states.",
        f"{METTA}: every minibatch; it is the reason why the first ratio of an update was not 1.",
        "replay",
        "`memory/replay_error` of a short run: |ratio - 1| before any weight has changed",
        memory_traps.replay_error_of_a_run,
        memory_traps.zero_start_in_training,
        1e-5,
    ),
    Trap(
        3,
        "no resets in training",
        "The update does not know where episodes start, so memory and gradients run across their ends "
        "within a segment.",
        f"{METTA}: minibatches held observations and no flags; still so in January 2026, then on purpose.",
        "replay",
        "`memory/replay_error` of a short run: |ratio - 1| before any weight has changed",
        memory_traps.replay_error_of_a_run,
        memory_traps.no_resets_in_training,
        1e-5,
    ),
    Trap(
        4,
        "terminal observation leak",
        "With next-step autoreset, done comes with the final observation of the old episode. A policy "
        "that clears there and then reads that observation carries it into the new episode.",
        f"{METTA}, by way of PufferLib's vectorization: a step of the old episode in every new one.",
        "clear",
        "change of an episode's values with the final observation of the previous episode",
        memory_traps.effect_of_final_obs_on_the_next_episode,
        memory_traps.terminal_observation_leak,
    ),
    Trap(
        5,
        "evaluation never resets",
        "State is cleared once before an evaluation, and the policy gets no episode starts: every later "
        "episode starts with the state of the previous one.",
        f"{METTA}: simulations passed observations alone.",
        "clear",
        "share of episodes whose actions differ from those after a fresh start",
        memory_traps.share_of_episodes_not_played_as_if_they_were_the_first,
        memory_traps.evaluation_never_resets,
    ),
    Trap(
        6,
        "state pickled with weights",
        "A policy is pickled together with the hidden states of its agents; loaded for another number of "
        "agents it crashes, or continues with states of other agents.",
        f"{METTA}: checkpoints that could not be played.",
        "weights are saved alone, and a store copies as an empty one (restore)",
        "hidden-state values in three copies of a policy: saved, pickled, copied",
        training_traps.remembered_numbers_in_saved_weights,
        training_traps.state_pickled_with_weights,
    ),
    Trap(
        7,
        "one slot per slice",
        "States are stored by the first agent of a slice. When the slices change, some agents silently "
        "start from zeros.",
        f"{METTA}: every recurrent policy.",
        "isolate; a slice that is not allocated is an error",
        "how far values move when two of four agents act in their own slice",
        memory_traps.difference_when_slices_change,
        memory_traps.slot_by_slice,
        1e-9,
    ),
    Trap(
        8,
        "no check of batch or device",
        "A stored state is returned without checking size, dtype and device; the failure appears far "
        "from its cause, or never.",
        f"{METTA}: rollout states were used with minibatches of another size in September 2025; the first "
        "fix was to start from zeros.",
        "the store raises an error with both sizes, dtypes or devices",
        "mismatches accepted without an error, of three: size, dtype, device",
        memory_traps.mismatches_accepted,
        memory_traps.slot_by_slice,
    ),
    Trap(
        9,
        "state shared across agents in play",
        "Agents act one after the other and share one hidden state.",
        "Metta, November 2025: agents looked random in local play and played well elsewhere.",
        "isolate",
        "difference of the values of four agents run one by one and as a batch",
        memory_traps.difference_when_each_agent_is_served_alone,
        memory_traps.one_memory_for_all_in_play,
        1e-9,
    ),
    Trap(
        10,
        "rows overwritten",
        "The buffer's rows are not a multiple of the number of agents. The last ones to be filled wrap "
        "around: whole rows are lost, others end in a step of another agent.",
        f"{METTA}, at its default sizes: about half of the collected steps were thrown away, and half of "
        "the rows held a stale last step.",
        "rows are a multiple of the agents, and an invalid size is an error that proposes valid ones",
        "share of collected steps that are in no complete row when the update starts",
        training_traps.share_of_steps_lost,
        training_traps.rows_overwritten,
    ),
    Trap(
        11,
        "update on a copy",
        "Values and ratios of a minibatch should be written to the buffer. Indexing its rows copies "
        "them, so the writes are lost.",
        f"{METTA}, and all later versions: the buffer has no field for the ratio.",
        "the buffer is compared with the outputs of the latest update",
        "how far a refreshed value or ratio in the buffer is from what it should be",
        training_traps.error_of_refreshed_values_and_ratios,
        training_traps.update_on_a_copy,
        1e-9,
    ),
    Trap(
        12,
        "zero grad against accumulation",
        "A minibatch is split into micro-batches whose gradients should accumulate, but zero_grad() runs "
        "before each: only the last one counts.",
        f"{METTA}: gradient accumulation could be configured, and all micro-batches but the last were lost.",
        "the gradient of the micro-batches is compared with that of the full minibatch (agree)",
        "how far the gradient of four micro-batches is from that of the full minibatch, relative to its length",
        training_traps.error_of_accumulated_gradients,
        training_traps.zero_grad_before_every_backward,
        1e-9,
    ),
    Trap(
        13,
        "uint8 normalization",
        "Values of tokens are divided by their size, and the quotient is written back into bytes: 9 of "
        "10 is 0, and so is everything below.",
        f"{METTA}: the attention policies.",
        "encoders are compared with value / size",
        "largest error of a value of size 10",
        training_traps.error_of_normalized_values,
        training_traps.normalized_in_bytes,
        1e-5,
    ),
    Trap(
        14,
        "index formula",
        "The flat index of an action (type, argument) uses the largest argument instead of the number of "
        "arguments: types after the first share indices.",
        f"{METTA}: a second term repaired it in one place and was left out in two.",
        "flat indices and pairs are converted both ways",
        "share of the arena's 19 actions with the wrong flat index",
        training_traps.share_of_actions_with_the_wrong_number,
        training_traps.index_formula,
    ),
    Trap(
        15,
        "swapped axes of the advantage",
        "A second way to compute the advantage, for machines without the kernel, swaps the time and "
        "batch axes. No "
        "shape is checked: the result is wrong without an error.",
        "Metta: its fallback for Apple's GPUs, until December 2025.",
        "isolate; one function on every device, compared with a plain loop",
        "how far advantages move with the rewards of another agent",
        training_traps.effect_of_other_rewards_on_advantages,
        training_traps.swapped_axes_of_the_advantage,
    ),
    Trap(
        16,
        "evaluation without no grad",
        "An evaluation runs without torch.no_grad(): every step builds its graph, and one stored output "
        "keeps all of them alive.",
        "Metta, January 2026: evaluations ran out of memory.",
        "bounded",
        "nodes of graphs that the values of 30 steps hold",
        training_traps.graph_nodes_held_by_an_evaluation,
        training_traps.evaluation_with_gradients,
    ),
    Trap(
        17,
        "silent default key",
        "Where a batch has no environment id, memory number 0 is used for all of them.",
        f"{METTA}: every recurrent policy.",
        "isolate; a batch without `training_env_id_start` is refused",
        "how far values of two slices move when neither is named",
        memory_traps.difference_without_env_id,
        memory_traps.slice_zero_by_default,
    ),
    Trap(
        18,
        "both flags required for a reset",
        "State is cleared only if a batch holds both flags, `dones` and `truncateds`. A single flag is "
        "ignored without an error.",
        f"{METTA}: every recurrent policy.",
        "clear; either flag is enough, and none is refused",
        "how far an episode whose start is marked by one flag is from one that is new",
        memory_traps.difference_with_one_flag,
        memory_traps.both_flags_required,
    ),
]
