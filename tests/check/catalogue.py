"""Everything the check must catch, with the pattern it must name; and everything it must let pass."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import nn

from check import foreign, own
from handwritten import NewLSTMPolicy
from holdfast.check.subjects import Bare, CleanRL, Puffer, Subject, Wrapped
from holdfast.policies import Fast
from holdfast.worlds import make_world
from small import SPEC, Small, make_small


@dataclass(frozen=True)
class Exhibit:
    """One way to be wrong: who is wrong, which law notices, which pattern explains it, where it was seen."""

    name: str
    make: Callable[[], Subject]
    law: str
    pattern: str | None
    side: str
    cell: str
    seen: str = ""

    @property
    def story(self):
        """What is wrong, in a sentence."""
        return self.make.__doc__


def seeded(make):
    torch.manual_seed(0)
    return make()


def as_told_by(who, make):
    """Let a subject's maker tell what the docstring of what is wrong about it tells."""
    make.__doc__ = (who.__doc__ or "").strip().splitlines()[0] if who.__doc__ else None
    return make


def mine(kind=Small, **options):
    return as_told_by(kind, lambda: Wrapped(make_small(kind, **options), SPEC))


def by(**hooks):
    """Put Holdfast's small policy into the hands of a trainer that is wrong."""
    (hook,) = hooks.values()
    methods = {name: hook if isinstance(hook, type) else staticmethod(hook) for name, hook in hooks.items()}
    return as_told_by(hook, lambda: type("Sabotaged", (Wrapped,), methods)(make_small(), SPEC))


def fast(kind=Fast):
    world = make_world("recall", agents=1)
    make = kind if kind is not Fast else lambda: Fast(world.spec)
    return as_told_by(kind, lambda: Wrapped(seeded(make), world.spec))


def bare(make, **options):
    return as_told_by(make, lambda: Bare(seeded(make), **{"obs": 5, **options}))


def agent(kind=foreign.Agent, subject=CleanRL, **options):
    wrong = kind if subject is CleanRL else subject
    return as_told_by(wrong, lambda: subject(seeded(lambda: kind(**options)), obs=4, actions=3))


def functions(**options):
    wrong = next(
        (options[key] for key in ("wrap", "replay", "value", "act") if key in options), foreign.functions
    )
    return as_told_by(wrong, lambda: seeded(lambda: foreign.functions(**options)))


def puffer(clears, trainer="pufferlib"):
    make = lambda: Puffer(seeded(lambda: foreign.Swims(clears)), obs=5, trainer=trainer)  # noqa: E731
    return as_told_by(puffer_says, make)


def puffer_says():
    """Wipes all states before each rollout, and clears at no start."""


NEVER = "memory is never cleared"
LATE = "state cleared one step late"
HIDDEN = "keeps state outside of the state it returns"
EVERY_CALL = "every call starts from nothing"

WRONG = [
    # When memory is cleared, in rollouts and everywhere.
    Exhibit(
        "NoClear",
        mine(own.NoClear),
        "clear",
        NEVER,
        "everywhere",
        "LSTM, 2 layers",
        "thu-ml/tianshou#486; chengxuxin/extreme-parkour#12",
    ),
    Exhibit(
        "PufferLib's trainer",
        puffer(False),
        "clear",
        "memory wiped before each rollout, and cleared nowhere else",
        "rollout",
        "LSTM",
        "PufferLib 3.0, pufferl.py:218-261",
    ),
    Exhibit(
        "LateClear",
        mine(own.LateClear),
        "clear",
        LATE,
        "everywhere",
        "LSTM, 2 layers",
        "LARG/jax-aht#115; FLAIROx/JaxMARL#119; instadeepai/Mava#1006; Unity-Technologies/ml-agents#4941",
    ),
    Exhibit(
        "ClearsAfterReading",
        bare(foreign.ClearsAfterReading),
        "clear",
        LATE,
        "everywhere",
        "GRU cell",
        "LARG/jax-aht#115",
    ),
    Exhibit(
        "ClearsOnTerminatedOnly",
        mine(own.ClearsOnTerminatedOnly),
        "clear",
        "clears on terminated only",
        "rollout",
        "LSTM, 2 layers",
        "Metta, cortex.py:234; skrl, recurrent examples",
    ),
    Exhibit(
        "ClearsOnTruncatedOnly",
        mine(own.ClearsOnTruncatedOnly),
        "clear",
        "clears on truncated only",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "GRU cleared on terminated only",
        functions(wrap=foreign.terminated_only),
        "clear",
        "clears on terminated only",
        "everywhere",
        "GRU",
        "skrl, recurrent examples",
    ),
    Exhibit(
        "ClearsEverybody",
        bare(foreign.ClearsEverybody),
        "carry",
        "one agent's start clears everybody",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClearsTogether",
        bare(foreign.ClearsTogether),
        "clear",
        "clears only when all agents start together",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClearsByTheFirstRow",
        bare(foreign.ClearsByTheFirstRow),
        "isolate",
        "the first row's flags clear everybody",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "KeepsTheCell",
        agent(foreign.KeepsTheCell),
        "clear",
        "only part of the state is cleared",
        "everywhere",
        "LSTM",
    ),
    Exhibit(
        "KeepsTheDeepLayer",
        agent(foreign.KeepsTheDeepLayer),
        "clear",
        "only part of the state is cleared",
        "everywhere",
        "GRU, 2 layers",
    ),
    Exhibit(
        "OtherLayerNotCleared",
        mine(own.OtherLayerNotCleared),
        "replay",
        "only part of the state is cleared",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit("NoClearInFloat32", mine(own.NoClearInFloat32), "clear", NEVER, "everywhere", "LSTM, 2 layers"),
    Exhibit("NoClearInTraining", mine(own.NoClearInTraining), "clear", NEVER, "rollout", "LSTM, 2 layers"),
    Exhibit(
        "ReadsWhereNobodyActs",
        mine(own.ReadsWhereNobodyActs),
        "clear",
        "reads where nobody acts",
        "everywhere",
        "LSTM, 2 layers",
        "Gymnasium NEXT_STEP rows in skrl",
    ),
    Exhibit(
        "DeafToTrials",
        mine(own.DeafToTrials, clear_on="trial"),
        "clear",
        "takes no notice of trials",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "Forgetful",
        mine(own.Forgetful),
        "carry",
        EVERY_CALL,
        "everywhere",
        "LSTM, 2 layers",
        "ray-project/ray#36774; pytorch/rl#1406",
    ),
    Exhibit("Deaf", bare(foreign.Deaf), "carry", EVERY_CALL, "everywhere", "GRU cell", "pytorch/rl#1406"),
    Exhibit(
        "WipesBeforeRollouts",
        by(collector=own.WipesBeforeRollouts),
        "carry",
        "memory wiped before each rollout",
        "rollout",
        "LSTM, 2 layers",
        "PufferLib 3.0, pufferl.py:218-221",
    ),
    Exhibit(
        "Ages", bare(foreign.Ages), "clear", "only part of the state is cleared", "everywhere", "GRU cell"
    ),
    # In evaluations.
    Exhibit(
        "ForgetsInEvaluation",
        bare(foreign.ForgetsInEvaluation),
        "carry",
        f"{EVERY_CALL} (in evaluation)",
        "evaluation",
        "GRU cell",
    ),
    Exhibit(
        "NoClearInEvaluation",
        mine(own.NoClearInEvaluation),
        "clear",
        f"{NEVER} (in evaluation)",
        "evaluation",
        "LSTM, 2 layers",
        "isaac-sim/IsaacLab#3837",
    ),
    Exhibit(
        "An evaluation without flags",
        by(play=own.evaluate_without_clearing),
        "clear",
        f"{NEVER} (in evaluation)",
        "evaluation",
        "LSTM, 2 layers",
        "isaac-sim/IsaacLab#3837; PufferLib 3.0, pufferl.py:939-972",
    ),
    Exhibit(
        "An evaluation in place",
        by(play=own.evaluate_in_place),
        "pure",
        "evaluation touches the training's memory",
        "evaluation",
        "LSTM, 2 layers",
    ),
    # In updates.
    Exhibit(
        "UpdateIgnoresClears",
        mine(own.UpdateIgnoresClears),
        "replay",
        f"{NEVER} (in updates)",
        "update",
        "LSTM, 2 layers",
        "Metta-AI/metta#2233; cortex.py:295",
    ),
    Exhibit(
        "GRU replayed without clears",
        functions(replay=foreign.replay_without_clears),
        "clear",
        f"{NEVER} (in updates)",
        "update",
        "GRU",
        "PufferLib 3.0, models.py:152-195",
    ),
    Exhibit(
        "UpdateClearsAtTheStartOnly",
        mine(own.UpdateClearsAtTheStartOnly),
        "replay",
        "clears looked at in a segment's first step only (in updates)",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "An update that clears late",
        by(again=own.replay_clears_late),
        "replay",
        f"{LATE} (in updates)",
        "update",
        "LSTM, 2 layers",
        "LARG/jax-aht#115",
    ),
    Exhibit(
        "FlagsLateInUpdates",
        agent(foreign.FlagsLateInUpdates),
        "replay",
        f"{LATE} (in updates)",
        "update",
        "LSTM",
        "LARG/jax-aht#115; PKU-MARL/HARL#75",
    ),
    Exhibit(
        "An update that misses the first flag",
        by(again=own.replay_misses_the_first_flag),
        "replay",
        "the clear at a segment's first step is missed (in updates)",
        "buffer",
        "LSTM, 2 layers",
        "Metta, cortex.py:256-265",
    ),
    Exhibit(
        "ZeroEntry",
        mine(own.ZeroEntry),
        "replay",
        "training starts from zeros",
        "update",
        "LSTM, 2 layers",
        "PufferLib 3.0, pufferl.py:358-364; tianshou, ppo.py:160",
    ),
    Exhibit(
        "FastZeroEntry",
        fast(own.FastZeroEntry),
        "replay",
        "training starts from zeros",
        "update",
        "LSTM, 2 layers",
        "danijar/dreamer#24",
    ),
    Exhibit(
        "StartsFromZeros",
        agent(subject=foreign.StartsFromZeros),
        "replay",
        "training starts from zeros",
        "update",
        "LSTM",
        "tianshou, ppo.py:160",
    ),
    Exhibit(
        "TimeAndBatchSwapped",
        mine(own.TimeAndBatchSwapped),
        "isolate",
        "rows mixed: time and batch swapped",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "BatchFirst",
        agent(foreign.BatchFirst),
        "replay",
        "rows mixed: time and batch swapped",
        "update",
        "LSTM",
    ),
    Exhibit(
        "ForgetsOneSequence",
        agent(foreign.ForgetsOneSequence),
        "agree",
        "clears ignored when the batch holds one sequence",
        "update",
        "LSTM",
    ),
    Exhibit(
        "OtherInSegments",
        bare(foreign.OtherInSegments),
        "replay",
        None,
        "update",
        "GRU",
        "PufferLib 4.0, models.py (GRU, several layers)",
    ),
    # In buffers.
    Exhibit(
        "EntryAfterTheStep",
        by(collector=own.EntryAfterTheStep),
        "replay",
        "entry state is the one after the step",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntryOneStepOld",
        by(collector=own.EntryOneStepOld),
        "replay",
        "entry state is one step old",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "OneEntryForARollout",
        by(collector=own.OneEntryForARollout),
        "replay",
        "every segment starts from the rollout's entry state",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntriesBackwards",
        by(collector=own.EntriesBackwards),
        "replay",
        "entry state of another segment of the same agent",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntriesShuffled",
        by(collector=own.EntriesShuffled),
        "isolate",
        "entry states of other rows",
        "buffer",
        "LSTM, 2 layers",
        "pytorch/rl#4474",
    ),
    Exhibit(
        "HalfAnEntry",
        by(collector=own.HalfAnEntry),
        "replay",
        "part of the entry state is lost",
        "buffer",
        "LSTM, 2 layers",
    ),
    # Between agents.
    Exhibit(
        "SharedSlices",
        mine(own.SharedSlices),
        "isolate",
        "state shared between slices",
        "rollout",
        "LSTM, 2 layers",
        "pytorch/rl#4474",
    ),
    Exhibit(
        "BatchMatesMixed",
        mine(own.BatchMatesMixed),
        "isolate",
        "rows see each other within a call",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "Mixes", bare(foreign.Mixes), "isolate", "rows see each other within a call", "everywhere", "GRU"
    ),
    Exhibit(
        "An agent that plays alone",
        functions(act=foreign.forget_if_alone),
        "isolate",
        "clears ignored when the batch holds one sequence",
        "evaluation",
        "GRU",
    ),
    # Graphs.
    Exhibit(
        "Scores without a gradient",
        functions(act=foreign.step_by_name, replay=foreign.replay_without_gradient),
        "cut",
        "no gradient arrives",
        "update",
        "GRU",
    ),
    Exhibit(
        "NoDetach",
        mine(own.NoDetach),
        "cut",
        "graph kept across calls",
        "rollout",
        "LSTM",
        "Metta, policies/puffer.py:199-211",
    ),
    Exhibit(
        "GRU lived with its graph",
        functions(no_grad=False),
        "cut",
        "graph kept across calls",
        "rollout",
        "GRU",
        "Metta, policies/puffer.py:199-211",
    ),
    Exhibit(
        "EntryWithGraph",
        mine(own.EntryWithGraph),
        "cut",
        "gradient flows into the entry state",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "GradientThroughTheEncoder",
        mine(own.GradientThroughTheEncoder),
        "cut",
        "graph kept beside the state",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "CutsInside", mine(own.CutsInside), "cut", "graph cut inside the segment", "update", "LSTM, 2 layers"
    ),
    Exhibit(
        "CutsEveryStep", agent(foreign.CutsEveryStep), "cut", "graph cut inside the segment", "update", "LSTM"
    ),
    Exhibit(
        "NaNGradient",
        mine(own.NaNGradient),
        "cut",
        "the gradient is not a number",
        "update",
        "LSTM, 2 layers",
    ),
    # What is kept, and where.
    Exhibit("SecondMemory", mine(own.SecondMemory), "restore", HIDDEN, "rollout", "LSTM, 2 layers"),
    Exhibit("A global", bare(foreign.Everywhere), "pure", HIDDEN, "everywhere", "GRU cell"),
    Exhibit("A closure", bare(foreign.closure), "restore", HIDDEN, "everywhere", "GRU cell"),
    Exhibit(
        "ClearsInPlace",
        bare(foreign.ClearsInPlace),
        "pure",
        "writes into its inputs",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClampsInPlace",
        bare(foreign.ClampsInPlace),
        "pure",
        "writes into its inputs",
        "everywhere",
        "GRU cell",
    ),
    Exhibit("OneBuffer", bare(foreign.OneBuffer), "pure", "writes into its inputs", "rollout", "GRU cell"),
    Exhibit(
        "A value that writes",
        functions(value=foreign.value_in_place),
        "pure",
        "writes into its inputs",
        "rollout",
        "GRU",
    ),
    Exhibit(
        "RollsDice",
        bare(foreign.RollsDice),
        "replay",
        "draws random numbers while it thinks",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "BootstrapAdvances",
        mine(own.BootstrapAdvances),
        "pure",
        "asking for a value advances the memory",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "Hoards", mine(own.Hoards), "bounded", "keeps everything it meets", "everywhere", "LSTM, 2 layers"
    ),
    Exhibit(
        "HoardsReplays",
        mine(own.HoardsReplays),
        "bounded",
        "keeps everything it meets",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "SavesHalf",
        mine(own.SavesHalf),
        "restore",
        "part of the memory is not saved",
        "rollout",
        "LSTM, 2 layers",
        "Metta, cortex.py:316-322",
    ),
    Exhibit(
        "DropsOut",
        mine(own.DropsOut),
        "replay",
        "draws random numbers while it thinks",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "OtherWhenCompiled",
        mine(own.OtherWhenCompiled),
        "agree",
        "different once it is compiled",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "WrongKernel",
        mine(own.WrongKernel),
        "agree",
        "the cell differs from its reference",
        "update",
        "LSTM, 2 layers",
        "pytorch/rl#3752",
    ),
]

IMAGES = spaces.Box(0, 255, (1, 8, 8), "uint8")

RIGHT = {
    "fast": fast(),
    "RecurrentPolicy, 2 layers": mine(),
    "RecurrentPolicy, 1 layer": mine(num_layers=1),
    "RecurrentPolicy, 3 layers of 7": mine(num_layers=3, hidden_size=7),
    "RecurrentPolicy, cleared at trials": mine(clear_on="trial"),
    "RecurrentPolicy, never cleared": mine(clear_on="never"),
    "hand-written LSTMWrapper": lambda: Wrapped(seeded(lambda: NewLSTMPolicy(SPEC)), SPEC),
    "nn.LSTM, time first": bare(lambda: nn.LSTM(5, 16)),
    "nn.LSTM, batch first, 2 layers": bare(lambda: nn.LSTM(5, 16, 2, batch_first=True)),
    "nn.GRU, 3 layers": bare(lambda: nn.GRU(5, 16, 3)),
    "nn.RNN": bare(lambda: nn.RNN(5, 16)),
    "nn.LSTMCell": bare(lambda: nn.LSTMCell(5, 16)),
    "nn.GRUCell": bare(lambda: nn.GRUCell(5, 16)),
    "a module that clears itself": bare(foreign.Stepper),
    "a learnt initial state": bare(
        foreign.LearnedStart, initial=lambda module, rows: module.start.expand(rows, 16).clone()
    ),
    "built in float64": bare(lambda: foreign.Sequence().double()),
    "built in bfloat16": bare(lambda: nn.GRU(5, 16).bfloat16()),
    "GRU with 5 numbers, two outputs, an optional third argument, a switch": bare(foreign.Several),
    "probabilities": bare(foreign.Probabilities),
    "a rectified eye": bare(foreign.Rectified),
    "flags as numbers": bare(foreign.Masks),
    "CleanRL style, continuous actions": lambda: CleanRL(
        seeded(foreign.Continuous), obs=4, actions=spaces.Box(-1, 1, (2,))
    ),
    "functions that return a tuple": functions(act=foreign.step_by_name, replay=foreign.replay_by_name),
    "images": bare(foreign.Looks, obs=IMAGES),
    "whole numbers": bare(foreign.Names, obs=spaces.Discrete(7)),
    "CleanRL style, LSTM": agent(),
    "CleanRL style, GRU, 2 layers": lambda: CleanRL(
        seeded(lambda: foreign.Agent(nn.GRU, 2)), obs=4, actions=3
    ),
    "PufferLib style, a trainer that stores states": puffer(True, "stored"),
    "functions that cut segments at starts": functions(),
    "functions told how episodes ended": functions(wrap=foreign.either),
    "one rollout of four segments": functions(rollouts=1, segments=4),
    "four rollouts of one segment": functions(rollouts=4, segments=1),
    "no memory at all": lambda: seeded(foreign.without_memory),
}
