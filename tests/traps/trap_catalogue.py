"""The traps of the trainer that Holdfast follows, each with the measure that it fails and we pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from traps import memory_traps, training_traps

METTA = "Metta, August 2025"


@dataclass(frozen=True)
class Trap:
    """One way for a trainer to go wrong: what happens, where it did, and how it is felt here."""

    number: int
    name: str
    story: str
    reported_in: str
    caught: str
    """The law that forbids it, or what stands in its way."""
    size: str
    """What is measured, in words."""
    measure: Callable[[], float]
    """How much is wrong in the library as it is now."""
    sprung: Callable[[], AbstractContextManager]
    """Sets the trap in our own code."""
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
        "All memories are emptied before every rollout, in the middle of episodes. An agent with "
        "rollouts of 64 steps learns in episodes of 1,000 steps to remember no longer than that.",
        f"{METTA}: the trainer emptied every memory when a rollout began, and again before every "
        "minibatch; it came back in October by a repair elsewhere. PufferLib 3.0 does it too.",
        "carry",
        "share of agents that begin a rollout with an empty memory, in a run",
        memory_traps.share_of_agents_that_begin_a_rollout_with_nothing,
        memory_traps.wiped_at_the_rollouts_start,
    ),
    Trap(
        2,
        "zero start in training",
        "The rollout carried a state into the segment; the update replays it from zeros. Old and new "
        "probabilities are those of two different minds.",
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
        "The update does not know where episodes start, so memory and gradients run across their ends"
        " within a segment.",
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
        "Where environments restart one call late, an end comes with what was last seen of the old "
        "episode. Who forgets there and then reads it carries it into the new one.",
        f"{METTA}, by way of PufferLib's vectorisation: a step of the old episode in every new one.",
        "clear",
        "how far values of an episode move with the last observation of the one before",
        memory_traps.how_far_the_next_episode_feels_the_last_observation,
        memory_traps.terminal_observation_leak,
    ),
    Trap(
        5,
        "evaluation never resets",
        "Memory is emptied once before an evaluation, and the policy gets no episode starts: all but "
        "the first are played with the memory of those before.",
        f"{METTA}: simulations passed observations alone.",
        "clear",
        "share of episodes that are played otherwise than as an agent's first",
        memory_traps.share_of_episodes_not_played_as_if_they_were_the_first,
        memory_traps.evaluation_never_resets,
    ),
    Trap(
        6,
        "state pickled with weights",
        "A policy is pickled together with the hidden states of its agents; loaded for another number"
        " of agents it crashes, or continues with states of other agents.",
        f"{METTA}: checkpoints that could not be played.",
        "weights are saved alone, and a store copies as an empty one (restore)",
        "remembered numbers in three copies of a policy: saved, pickled, copied",
        training_traps.remembered_numbers_in_saved_weights,
        training_traps.state_pickled_with_weights,
    ),
    Trap(
        7,
        "one slot per slice",
        "Memories are kept by the first agent of a slice. When agents are served in other slices, "
        "some find nothing where their memory was, without any error.",
        f"{METTA}: every recurrent policy.",
        "isolate; a slice that is not open is refused",
        "how far values move when two of four agents are served alone",
        memory_traps.difference_when_slices_change,
        memory_traps.slot_by_slice,
        1e-9,
    ),
    Trap(
        8,
        "no check of batch or device",
        "A stored state is handed out whatever its size, precision and device, and fails far from its"
        " cause, or not at all.",
        f"{METTA}: states of a rollout met minibatches of another size in September 2025, and were "
        "first silenced by starting from zeros.",
        "the store refuses, and says what was and what is",
        "misfits of three that are taken without a word: size, precision, device",
        memory_traps.misfits_taken_without_a_word,
        memory_traps.slot_by_slice,
    ),
    Trap(
        9,
        "state shared across agents in play",
        "Agents are asked one after the other, and all of them remember in one place.",
        "Metta, November 2025: agents that looked random when played at home, and played well elsewhere.",
        "isolate",
        "how far values of four agents asked one by one are from those asked together",
        memory_traps.difference_when_each_agent_is_served_alone,
        memory_traps.one_memory_for_all_in_play,
        1e-9,
    ),
    Trap(
        10,
        "rows overwritten",
        "The buffer's rows are no multiple of the agents. The last ones to be filled wrap around: "
        "whole rows are lost, others end in a step of another agent.",
        f"{METTA}, at its default sizes: about half of the collected steps were thrown away, and "
        "half of the rows held a stale last step.",
        "rows are a multiple of the agents, and a size that cannot be is refused with sizes that can",
        "share of collected steps that are in no whole row when learning begins",
        training_traps.share_of_steps_lost,
        training_traps.rows_overwritten,
    ),
    Trap(
        11,
        "update on a copy",
        "Values and ratios of a minibatch are to be refreshed in the buffer. But its rows were picked"
        " by an index, which copies; what is written there never arrives.",
        f"{METTA}, and ever after: the ratio was not even among what the buffer holds.",
        "the buffer is compared with what the weights say that saw it last",
        "how far a refreshed value or ratio in the buffer is from what it should be",
        training_traps.error_of_refreshed_values_and_ratios,
        training_traps.update_on_a_copy,
        1e-9,
    ),
    Trap(
        12,
        "zero grad against accumulation",
        "A minibatch is computed in pieces whose gradients are to add up, and gradients are set to "
        "nothing before each piece: only the last one is learnt from.",
        f"{METTA}: the number of pieces could be set, and all but one were lost.",
        "the gradient of the pieces is compared with that of the whole (agree)",
        "how far the gradient in four pieces is from that of the whole, relative to its length",
        training_traps.error_of_accumulated_gradients,
        training_traps.zero_grad_before_every_backward,
        1e-9,
    ),
    Trap(
        13,
        "uint8 normalisation",
        "Values of tokens are divided by their size, and the quotient is written back into bytes: 9 "
        "of 10 is 0, and so is everything below.",
        f"{METTA}: the attention policies.",
        "encoders are compared with value / size",
        "largest error of a value of size 10",
        training_traps.error_of_normalised_values,
        training_traps.normalised_in_bytes,
        1e-5,
    ),
    Trap(
        14,
        "index formula",
        "The number of an action (type, argument) is counted from largest arguments, and not from how"
        " many arguments there are: types after the first share their numbers.",
        f"{METTA}: a second term repaired it in one place and was left out in two.",
        "numbers and pairs are turned into each other and back",
        "share of the arena's 19 actions that get another one's number",
        training_traps.share_of_actions_with_the_wrong_number,
        training_traps.index_formula,
    ),
    Trap(
        15,
        "swapped axes of the advantage",
        "A second way to compute the advantage, for machines without the kernel, takes time for "
        "agents. Everything fits if there are as many rows as steps, and something comes out in any "
        "case.",
        "Metta: its fallback for Apple's GPUs, until December 2025.",
        "isolate; one function on every device, compared with a plain loop",
        "how far advantages move with the rewards of another agent",
        training_traps.how_far_advantages_feel_the_rewards_of_others,
        training_traps.swapped_axes_of_the_advantage,
    ),
    Trap(
        16,
        "evaluation without no grad",
        "Nothing is learnt from an evaluation, but every step builds its graph, and who keeps a number keeps them all.",
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
        memory_traps.difference_when_nobody_says_whose_turn_it_is,
        memory_traps.slice_zero_by_default,
    ),
    Trap(
        18,
        "both flags required for a reset",
        "Memory is emptied only if a batch holds both flags, `dones` and `truncateds`. A single flag "
        "is ignored without an error.",
        f"{METTA}: every recurrent policy.",
        "clear; either flag is enough, and none is refused",
        "how far an episode whose start is marked by one flag is from one that is new",
        memory_traps.difference_behind_an_end_told_by_one_flag,
        memory_traps.both_flags_required,
    ),
]
