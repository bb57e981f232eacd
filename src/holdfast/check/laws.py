"""The nine laws of memory, measured on a policy. Proof in float64, practice in float32."""

from collections.abc import Callable, Iterable, Iterator

from holdfast.check import flow, state
from holdfast.check.bench import AGENTS, Bench, set_up
from holdfast.check.results import Law, Laws, Measurement
from holdfast.policies import LSTMWrapper, make_policy
from holdfast.worlds import World, make_world

LAWS: dict[str, Callable[[Bench], list[Measurement]]] = {
    "cut": flow.cut,
    "carry": flow.carry,
    "clear": flow.clear,
    "replay": state.replays,
    "isolate": flow.isolate,
    "pure": state.pure,
    "bounded": state.bounded,
    "restore": state.restore,
    "agree": state.agree,
}


def check(policy: LSTMWrapper | str, world: World | None = None) -> Laws:
    """Measure every law of memory on a policy; `laws.ok` says whether all hold.

    The policy is copied, not touched. `world` is the one it was built for, `recall` by default.
    """
    return Laws(list(measure(policy, world)))


def measure(
    policy: LSTMWrapper | str, world: World | None = None, names: Iterable[str] = tuple(LAWS)
) -> Iterator[Law]:
    """Measure law by law, so that somebody can watch or ask for some laws only."""
    world = world or make_world("recall", agents=AGENTS)
    policy = make_policy(policy, world, seed=0) if isinstance(policy, str) else policy
    bench = set_up(policy, world.spec)
    for name in names:
        yield Law(name, LAWS[name](bench))
