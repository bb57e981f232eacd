"""Broken policies with the law and the pattern the check must report, and correct policies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import nn

from helpers import broken_policies as broken
from helpers import foreign_policies as foreign
from helpers.manual_policy import NewLSTMPolicy
from helpers.small_policy import SPEC, Small, make_small
from holdfast.check.adapters import CleanRL, HoldfastPolicy, PolicyAdapter, Puffer, RawModule
from holdfast.policies import Fast
from holdfast.worlds import make_world


@dataclass(frozen=True)
class Exhibit:
    """A broken policy, the law it breaks, the known bug behind it, and where the bug was reported."""

    name: str
    make: Callable[[], PolicyAdapter]
    law: str
    pattern: str
    side: str
    cell: str
    reported_in: str = ""

    @property
    def story(self):
        """The bug in one sentence."""
        return self.make.__doc__


def seeded(make):
    torch.manual_seed(0)
    return make()


def with_story(source, make):
    """Copy the first line of the docstring of `source` to `make`."""
    make.__doc__ = (source.__doc__ or "").strip().splitlines()[0] if source.__doc__ else None
    return make


def small(kind=Small, **options):
    return with_story(kind, lambda: HoldfastPolicy(make_small(kind, **options), SPEC))


def with_trainer(**hooks):
    """The small policy with a broken collector, replay or evaluation."""
    (hook,) = hooks.values()
    methods = {name: hook if isinstance(hook, type) else staticmethod(hook) for name, hook in hooks.items()}
    return with_story(hook, lambda: type("Sabotaged", (HoldfastPolicy,), methods)(make_small(), SPEC))


def fast(kind=Fast):
    world = make_world("recall", agents=1)
    make = kind if kind is not Fast else lambda: Fast(world.spec)
    return with_story(kind, lambda: HoldfastPolicy(seeded(make), world.spec))


def raw_module(make, **options):
    def adapter():
        adapter = RawModule(seeded(make), **{"obs": 5, **options})
        # Modules without starts are cleared by their caller.
        adapter.must_clear = adapter.sees_first
        return adapter

    return with_story(make, adapter)


def agent(kind=foreign.Agent, adapter=CleanRL, **options):
    wrong = kind if adapter is CleanRL else adapter
    return with_story(wrong, lambda: adapter(seeded(lambda: kind(**options)), obs=4, actions=3))


def functions(**options):
    wrong = next((options[key] for key in ("wrap", "replay", "value", "act") if key in options), foreign.functions)
    return with_story(wrong, lambda: seeded(lambda: foreign.functions(**options)))


def puffer(clears, trainer="pufferlib"):
    make = lambda: Puffer(seeded(lambda: foreign.PufferStyle(clears)), obs=5, trainer=trainer)  # noqa: E731
    return with_story(puffer_story, make)


def puffer_story():
    """Zeroes all states before each rollout, and resets at no episode start."""


NEVER = "state never reset"
LATE = "state reset one step late"
HIDDEN = "state kept outside the returned state"
EVERY_CALL = "every call starts from zeros"

WRONG = [
    # When the state is reset, in rollouts and everywhere.
    Exhibit(
        "NoClear",
        small(broken.NoClear),
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
        "state reset before each rollout and nowhere else",
        "rollout",
        "LSTM",
        "PufferLib 3.0, pufferl.py:218-261",
    ),
    Exhibit(
        "LateClear",
        small(broken.LateClear),
        "clear",
        LATE,
        "everywhere",
        "LSTM, 2 layers",
        "LARG/jax-aht#115; FLAIROx/JaxMARL#119; instadeepai/Mava#1006; Unity-Technologies/ml-agents#4941",
    ),
    Exhibit(
        "ClearsAfterReading",
        raw_module(foreign.ClearsAfterReading),
        "clear",
        LATE,
        "everywhere",
        "GRU cell",
        "LARG/jax-aht#115",
    ),
    Exhibit(
        "ClearsOnTerminatedOnly",
        small(broken.ClearsOnTerminatedOnly),
        "clear",
        "state reset on terminated only",
        "rollout",
        "LSTM, 2 layers",
        "Metta, cortex.py:234; skrl, recurrent examples",
    ),
    Exhibit(
        "ClearsOnTruncatedOnly",
        small(broken.ClearsOnTruncatedOnly),
        "clear",
        "state reset on truncated only",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "GRU cleared on terminated only",
        functions(wrap=foreign.terminated_only),
        "clear",
        "state reset on terminated only",
        "everywhere",
        "GRU",
        "skrl, recurrent examples",
    ),
    Exhibit(
        "OneStartClearsAllRows",
        raw_module(foreign.OneStartClearsAllRows),
        "carry",
        "one episode start resets all rows",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClearsTogether",
        raw_module(foreign.ClearsTogether),
        "clear",
        "state reset only when all rows start together",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClearsByTheFirstRow",
        raw_module(foreign.ClearsByTheFirstRow),
        "isolate",
        "the first row's flags reset all rows",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "CellStateNotCleared",
        agent(foreign.CellStateNotCleared),
        "clear",
        "only part of the state is reset",
        "everywhere",
        "LSTM",
    ),
    Exhibit(
        "SecondLayerNotCleared",
        agent(foreign.SecondLayerNotCleared),
        "clear",
        "only part of the state is reset",
        "everywhere",
        "GRU, 2 layers",
    ),
    Exhibit(
        "OtherLayerNotCleared",
        small(broken.OtherLayerNotCleared),
        "replay",
        "only part of the state is reset",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit("NoClearInFloat32", small(broken.NoClearInFloat32), "clear", NEVER, "everywhere", "LSTM, 2 layers"),
    Exhibit("NoClearInTraining", small(broken.NoClearInTraining), "clear", NEVER, "rollout", "LSTM, 2 layers"),
    Exhibit(
        "UpdatesStateAtInvalidSteps",
        small(broken.UpdatesStateAtInvalidSteps),
        "clear",
        "invalid steps update the state",
        "everywhere",
        "LSTM, 2 layers",
        "Gymnasium NEXT_STEP rows in skrl",
    ),
    Exhibit(
        "IgnoresTrials",
        small(broken.IgnoresTrials, clear_on="trial"),
        "clear",
        "trial starts ignored",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "StartsEveryCallFromZeros",
        small(broken.StartsEveryCallFromZeros),
        "carry",
        EVERY_CALL,
        "everywhere",
        "LSTM, 2 layers",
        "ray-project/ray#36774; pytorch/rl#1406",
    ),
    Exhibit(
        "IgnoresState",
        raw_module(foreign.IgnoresState),
        "carry",
        EVERY_CALL,
        "everywhere",
        "GRU cell",
        "pytorch/rl#1406",
    ),
    Exhibit(
        "ClearsBeforeEachRollout",
        with_trainer(collector=broken.ClearsBeforeEachRollout),
        "carry",
        "state reset before each rollout",
        "rollout",
        "LSTM, 2 layers",
        "PufferLib 3.0, pufferl.py:218-221",
    ),
    Exhibit(
        "StepCountNotCleared",
        raw_module(foreign.StepCountNotCleared),
        "clear",
        "only part of the state is reset",
        "everywhere",
        "GRU cell",
    ),
    # In evaluations.
    Exhibit(
        "ForgetsInEvaluation",
        raw_module(foreign.ForgetsInEvaluation),
        "carry",
        f"{EVERY_CALL} (in evaluation)",
        "evaluation",
        "GRU cell",
    ),
    Exhibit(
        "NoClearInEvaluation",
        small(broken.NoClearInEvaluation),
        "clear",
        f"{NEVER} (in evaluation)",
        "evaluation",
        "LSTM, 2 layers",
        "isaac-sim/IsaacLab#3837",
    ),
    Exhibit(
        "An evaluation without flags",
        with_trainer(evaluate_fn=broken.evaluate_without_clearing),
        "clear",
        f"{NEVER} (in evaluation)",
        "evaluation",
        "LSTM, 2 layers",
        "isaac-sim/IsaacLab#3837; PufferLib 3.0, pufferl.py:939-972",
    ),
    Exhibit(
        "An evaluation in place",
        with_trainer(evaluate_fn=broken.evaluate_in_place),
        "pure",
        "evaluation modifies the training state",
        "evaluation",
        "LSTM, 2 layers",
    ),
    # In updates.
    Exhibit(
        "UpdateIgnoresClears",
        small(broken.UpdateIgnoresClears),
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
        small(broken.UpdateClearsAtTheStartOnly),
        "replay",
        "only a segment's first flag resets the state (in updates)",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "An update that clears late",
        with_trainer(replay_fn=broken.replay_clears_late),
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
        with_trainer(replay_fn=broken.replay_misses_the_first_flag),
        "replay",
        "a segment's first flag is ignored (in updates)",
        "buffer",
        "LSTM, 2 layers",
        "Metta, cortex.py:256-265",
    ),
    Exhibit(
        "ZeroEntry",
        small(broken.ZeroEntry),
        "replay",
        "replay starts from zeros",
        "update",
        "LSTM, 2 layers",
        "PufferLib 3.0, pufferl.py:358-364; tianshou, ppo.py:160",
    ),
    Exhibit(
        "FastZeroEntry",
        fast(broken.FastZeroEntry),
        "replay",
        "replay starts from zeros",
        "update",
        "LSTM, 2 layers",
        "danijar/dreamer#24",
    ),
    Exhibit(
        "StartsFromZeros",
        agent(adapter=foreign.StartsFromZeros),
        "replay",
        "replay starts from zeros",
        "update",
        "LSTM",
        "tianshou, ppo.py:160",
    ),
    Exhibit(
        "TimeAndBatchSwapped",
        small(broken.TimeAndBatchSwapped),
        "isolate",
        "time and batch axes swapped",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "BatchFirst",
        agent(foreign.BatchFirst),
        "replay",
        "time and batch axes swapped",
        "update",
        "LSTM",
    ),
    Exhibit(
        "ForgetsOneSequence",
        agent(foreign.ForgetsOneSequence),
        "agree",
        "resets ignored in a batch of one",
        "update",
        "LSTM",
    ),
    Exhibit(
        "OtherInSegments",
        raw_module(foreign.OtherInSegments),
        "replay",
        "outputs of a segment are computed in another way",
        "update",
        "GRU",
        "PufferLib 4.0, models.py (GRU, several layers)",
    ),
    # In buffers.
    Exhibit(
        "EntryAfterTheStep",
        with_trainer(collector=broken.EntryAfterTheStep),
        "replay",
        "entry state stored after the step",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntryOneStepOld",
        with_trainer(collector=broken.EntryOneStepOld),
        "replay",
        "entry state stored one step early",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "OneEntryForARollout",
        with_trainer(collector=broken.OneEntryForARollout),
        "replay",
        "every segment starts from the rollout's entry state",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntriesBackwards",
        with_trainer(collector=broken.EntriesBackwards),
        "replay",
        "entry state of another segment of the same agent",
        "buffer",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "EntriesShuffled",
        with_trainer(collector=broken.EntriesShuffled),
        "isolate",
        "entry states of other rows",
        "buffer",
        "LSTM, 2 layers",
        "pytorch/rl#4474",
    ),
    Exhibit(
        "EntryTensorDropped",
        with_trainer(collector=broken.EntryTensorDropped),
        "replay",
        "part of the entry state is lost",
        "buffer",
        "LSTM, 2 layers",
    ),
    # Between agents.
    Exhibit(
        "SharedSlices",
        small(broken.SharedSlices),
        "isolate",
        "state shared between slices",
        "rollout",
        "LSTM, 2 layers",
        "pytorch/rl#4474",
    ),
    Exhibit(
        "PolicyNormalizesOverBatch",
        small(broken.PolicyNormalizesOverBatch),
        "isolate",
        "rows of a batch mix",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "ModuleNormalizesOverBatch",
        raw_module(foreign.ModuleNormalizesOverBatch),
        "isolate",
        "rows of a batch mix",
        "everywhere",
        "GRU",
    ),
    Exhibit(
        "An agent that plays alone",
        functions(act=foreign.forget_if_alone),
        "isolate",
        "resets ignored in a batch of one",
        "evaluation",
        "GRU",
    ),
    # Graphs.
    Exhibit(
        "Scores without a gradient",
        functions(act=foreign.step_by_name, replay=foreign.replay_without_gradient),
        "cut",
        "no gradient",
        "update",
        "GRU",
    ),
    Exhibit(
        "NoDetach",
        small(broken.NoDetach),
        "cut",
        "stored state keeps its graph",
        "rollout",
        "LSTM",
        "Metta, policies/puffer.py:199-211",
    ),
    Exhibit(
        "GRU rollout with its graph",
        functions(no_grad=False),
        "cut",
        "stored state keeps its graph",
        "rollout",
        "GRU",
        "Metta, policies/puffer.py:199-211",
    ),
    Exhibit(
        "EntryWithGraph",
        small(broken.EntryWithGraph),
        "cut",
        "gradient flows into the entry state",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "GradientThroughTheEncoder",
        small(broken.GradientThroughTheEncoder),
        "cut",
        "graph kept outside the state",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "CutsInside",
        small(broken.CutsInside),
        "cut",
        "graph cut inside the segment",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit("CutsEveryStep", agent(foreign.CutsEveryStep), "cut", "graph cut inside the segment", "update", "LSTM"),
    Exhibit(
        "NaNGradient",
        small(broken.NaNGradient),
        "cut",
        "gradient is NaN",
        "update",
        "LSTM, 2 layers",
    ),
    # State kept in the wrong place.
    Exhibit("SecondMemory", small(broken.SecondMemory), "restore", HIDDEN, "rollout", "LSTM, 2 layers"),
    Exhibit("A global", raw_module(foreign.Everywhere), "pure", HIDDEN, "everywhere", "GRU cell"),
    Exhibit("A closure", raw_module(foreign.closure), "restore", HIDDEN, "everywhere", "GRU cell"),
    Exhibit(
        "ClearsInPlace",
        raw_module(foreign.ClearsInPlace),
        "pure",
        "inputs modified in place",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "ClampsInPlace",
        raw_module(foreign.ClampsInPlace),
        "pure",
        "inputs modified in place",
        "everywhere",
        "GRU cell",
    ),
    Exhibit("OneBuffer", raw_module(foreign.OneBuffer), "pure", "inputs modified in place", "rollout", "GRU cell"),
    Exhibit(
        "A value that writes",
        functions(value=foreign.value_in_place),
        "pure",
        "inputs modified in place",
        "rollout",
        "GRU",
    ),
    Exhibit(
        "OwnRandomGenerator",
        raw_module(foreign.OwnRandomGenerator),
        "replay",
        "random numbers in the forward pass",
        "everywhere",
        "GRU cell",
    ),
    Exhibit(
        "BootstrapAdvances",
        small(broken.BootstrapAdvances),
        "pure",
        "bootstrap value advances the state",
        "rollout",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "KeepsAllOutputs",
        small(broken.KeepsAllOutputs),
        "bounded",
        "memory use grows with time",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "KeepsReplayOutputs",
        small(broken.KeepsReplayOutputs),
        "bounded",
        "memory use grows with time",
        "update",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "CellStateNotSaved",
        small(broken.CellStateNotSaved),
        "restore",
        "part of the state is not saved",
        "rollout",
        "LSTM, 2 layers",
        "Metta, cortex.py:316-322",
    ),
    Exhibit(
        "UsesDropout",
        small(broken.UsesDropout),
        "replay",
        "random numbers in the forward pass",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "OtherWhenCompiled",
        small(broken.OtherWhenCompiled),
        "agree",
        "compiled and eager outputs differ",
        "everywhere",
        "LSTM, 2 layers",
    ),
    Exhibit(
        "WrongKernel",
        small(broken.WrongKernel),
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
    "RecurrentPolicy, 2 layers": small(),
    "RecurrentPolicy, 1 layer": small(num_layers=1),
    "RecurrentPolicy, 3 layers of 7": small(num_layers=3, hidden_size=7),
    "RecurrentPolicy, cleared at trials": small(clear_on="trial"),
    "RecurrentPolicy, never cleared": small(clear_on="never"),
    "hand-written LSTMWrapper": lambda: HoldfastPolicy(seeded(lambda: NewLSTMPolicy(SPEC)), SPEC),
    "nn.LSTM, time first": raw_module(lambda: nn.LSTM(5, 16)),
    "nn.LSTM, batch first, 2 layers": raw_module(lambda: nn.LSTM(5, 16, 2, batch_first=True)),
    "nn.GRU, 3 layers": raw_module(lambda: nn.GRU(5, 16, 3)),
    "nn.RNN": raw_module(lambda: nn.RNN(5, 16)),
    "nn.LSTMCell": raw_module(lambda: nn.LSTMCell(5, 16)),
    "nn.GRUCell": raw_module(lambda: nn.GRUCell(5, 16)),
    "a module that resets itself": raw_module(foreign.Stepper),
    "a learned initial state": raw_module(
        foreign.LearnedStart, initial=lambda module, rows: module.start.expand(rows, 16).clone()
    ),
    "built in float64": raw_module(lambda: foreign.Sequence().double()),
    "built in bfloat16": raw_module(lambda: nn.GRU(5, 16).bfloat16()),
    "GRU with 5 numbers, two outputs, an optional third argument, a switch": raw_module(foreign.Several),
    "probabilities": raw_module(foreign.Probabilities),
    "a ReLU on observations": raw_module(foreign.Rectified),
    "flags as numbers": raw_module(foreign.Masks),
    "CleanRL style, continuous actions": lambda: CleanRL(
        seeded(foreign.Continuous), obs=4, actions=spaces.Box(-1, 1, (2,))
    ),
    "functions that return a tuple": functions(act=foreign.step_by_name, replay=foreign.replay_by_name),
    "images": raw_module(foreign.Looks, obs=IMAGES),
    "integers": raw_module(foreign.Names, obs=spaces.Discrete(7)),
    "CleanRL style, LSTM": agent(),
    "CleanRL style, GRU, 2 layers": lambda: CleanRL(seeded(lambda: foreign.Agent(nn.GRU, 2)), obs=4, actions=3),
    "PufferLib style, a trainer that stores states": puffer(True, "stored"),
    "functions that cut segments at starts": functions(),
    "functions of terminated and truncated": functions(wrap=foreign.either),
    "one rollout of four segments": functions(rollouts=1, segments=4),
    "four rollouts of one segment": functions(rollouts=4, segments=1),
    "no memory at all": lambda: seeded(foreign.without_memory),
}
