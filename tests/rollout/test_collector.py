import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.manual_policy import NewLSTMPolicy
from helpers.scripted_world import Scripted, make_reader, random_script
from helpers.small_policy import OnlySpec
from holdfast import rng
from holdfast.errors import ContractError
from holdfast.learn import replay
from holdfast.policies import PolicyOutput, RecurrentPolicy, make_policy
from holdfast.policies.distributions import sample
from holdfast.rollout import Collector, bootstrap_value, step_to_td
from holdfast.worlds import Feature, Step, WorldSpec, tokens

A, T = 4, 5


def live(policy, world, length=2 * T, seed=0, rollouts=1):
    """Collect some rollouts; segments are copied, because the next rollout overwrites them."""
    collector = Collector(world, policy, length=length, horizon=T, seed=seed)
    return collector, [copy.deepcopy(collector.rollout(version)) for version in range(rollouts)]


@torch.no_grad()
def by_hand(policy, world, steps):
    """Run the script step by step with `unroll` alone; return outputs, and states before each step."""
    world = copy.copy(world)
    state, thoughts, states = policy.lstm.cell.initial(world.agents), [], []
    step = world.reset()
    for t in range(steps):
        states.append(state)
        thought, state = policy.unroll(step.obs, step.first, state, step.valid)
        thoughts.append(thought)
        if t + 1 < steps:
            step = world.step(torch.zeros(world.agents, dtype=torch.long))
    return thoughts, [*states, state]


def table(script, name, start, length):
    return script.tables[name][:, start : start + length]


def test_every_row_holds_consecutive_steps_of_one_agent():
    script = random_script(A, 40, 1)
    _, rollouts = live(make_reader(), script, length=3 * T, rollouts=2)
    for rollout, segments in enumerate(rollouts):
        assert len(segments) == A * 3
        assert bool((segments.version == rollout).all())
        numbers = segments.steps["env_obs"].squeeze(-1)
        for b in range(len(segments)):
            agent, segment = divmod(b, 3)
            begin = rollout * 3 * T + segment * T
            assert numbers[b].tolist() == [1000 * agent + begin + t for t in range(T)]
            assert segments.steps["rewards"][b].tolist() == numbers[b].tolist()
            for key, name in (("dones", "terminated"), ("truncateds", "truncated")):
                assert torch.equal(segments.steps[key][b], script.tables[name][agent, begin : begin + T])
            for name in ("first", "valid", "trial"):
                expected = script.tables[name][agent, begin : begin + T]
                assert torch.equal(segments.steps[name][b], expected)


def test_tail_is_the_step_after_the_row():
    script = random_script(A, 40, 2)
    _, rollouts = live(make_reader(), script, length=3 * T, rollouts=2)
    for rollout, segments in enumerate(rollouts):
        for b in range(len(segments)):
            agent, segment = divmod(b, 3)
            after = rollout * 3 * T + (segment + 1) * T
            assert segments.tail["rewards"][b] == 1000 * agent + after
            for key, name in (("dones", "terminated"), ("truncateds", "truncated")):
                assert segments.tail[key][b] == script.tables[name][agent, after]


def worth_by_hand(history, t):
    """The bootstrap value of one agent's step t for the step before it: that of its next valid step."""
    while t < len(history["valid"]) and not history["valid"][t]:
        t += 1
        if history["dones"][t]:
            return 0.0
        if history["truncateds"][t]:
            return float(history["last_values"][t])
    return float(history["values"][t])


def test_tail_value_is_bootstrap_value_of_next_step():
    cases = set()
    for seed in range(10):
        _, (segments,) = live(make_reader(), random_script(A, 40, seed, gone=0.4), length=3 * T)
        steps, tail = (part.unflatten(0, (A, 3)) for part in (segments.steps, segments.tail))
        assert torch.equal(tail["last_values"][:, :-1], steps["last_values"][:, 1:, 0])
        for agent in range(A):
            keys = ("dones", "truncateds", "values", "last_values")
            history = {key: torch.cat([steps[key][agent].flatten(), tail[key][agent, -1:]]) for key in keys}
            history["valid"] = steps["valid"][agent].flatten()
            for segment in range(2):
                value = float(tail["values"][agent, segment])
                assert value == worth_by_hand(history, (segment + 1) * T)
                acted = bool(steps["valid"][agent, segment + 1, 0])
                assert not acted or value == float(steps["values"][agent, segment + 1, 0])
                cases.add("acted" if acted else "ended" if value == 0 else "stepped over")
    assert cases == {"acted", "ended", "stepped over"}


def test_last_tail_value_is_first_value_of_next_rollout():
    script = random_script(A, 40, 4, gone=0.0)
    # Two agents' next episodes begin with the tail itself.
    script.tables["terminated"][:, 2 * T] = script.tables["first"][:, 2 * T] = torch.arange(A) < 2
    script.tables["truncated"][:, 2 * T] = torch.arange(A) == 2
    script.tables["first"][2, 2 * T] = True
    _, (one, two) = live(make_reader(), script, rollouts=2)
    ahead = one.tail["values"].unflatten(0, (A, 2))[:, -1]
    torch.testing.assert_close(ahead, two.steps["values"].unflatten(0, (A, 2))[:, 0, 0])
    ahead = one.tail["last_values"].unflatten(0, (A, 2))[:, -1]
    torch.testing.assert_close(ahead, two.steps["last_values"].unflatten(0, (A, 2))[:, 0, 0])


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_values_log_probs_and_entry_states_match_manual_rollout(seed):
    policy, script = make_reader(), random_script(A, 31, seed)
    _, rollouts = live(policy, script, rollouts=3)
    thoughts, states = by_hand(policy, script, 30)
    for rollout, segments in enumerate(rollouts):
        steps = segments.steps.unflatten(0, (A, 2)).flatten(1, 2)
        for t in range(10):
            now = thoughts[10 * rollout + t]
            torch.testing.assert_close(steps["values"][:, t], now.values)
            log_probs = torch.log_softmax(now.logits, -1)
            taken = log_probs.gather(1, steps["actions"][:, t, None])[:, 0]
            torch.testing.assert_close(steps["act_log_prob"][:, t], taken)
        entry = segments.entry_state.unflatten(0, (A, 2))
        for segment in range(2):
            # The state before this step, and so before this step's clear.
            then = states[10 * rollout + T * segment]
            for leaf in ("h", "c"):
                torch.testing.assert_close(entry[:, segment][leaf], then[leaf])
    with torch.no_grad():
        now = policy.store.read(0, A)
    for leaf in ("h", "c"):
        torch.testing.assert_close(now[leaf], states[30][leaf])


def test_entry_state_is_from_before_its_reset():
    ends = torch.zeros(A, 40, dtype=torch.bool)
    ends[:, T] = True
    _, (segments,) = live(make_reader(), Scripted(A, 40, terminated=ends))
    entry = segments.entry_state.unflatten(0, (A, 2))
    assert bool(segments.steps.unflatten(0, (A, 2))["first"][:, 1, 0].all())
    assert not entry[:, 0]["h"].any()
    assert bool((entry[:, 1]["h"] != 0).all())


def test_entry_states_are_copies():
    collector = Collector(Scripted(A, 40), make_reader(), length=2 * T, horizon=T, seed=0)
    segments = collector.rollout(0)
    before = segments.entry_state.clone()
    collector.rollout(1)
    assert bool((before == segments.entry_state).all())


def test_actions_are_a_pure_function_of_seed_agent_and_step():
    policy, script = make_reader(), random_script(A, 40, 5)
    _, rollouts = live(policy, script, seed=7, rollouts=3)
    thoughts, _ = by_hand(policy, script, 30)
    assert len(script.actions) == 30
    for t, taken in enumerate(script.actions):
        uniform = rng.uniform(7, rng.STREAM_ACTION, torch.arange(A), t)
        assert torch.equal(taken, sample(torch.log_softmax(thoughts[t].logits, -1), uniform))
    actions = torch.cat([segments.steps["actions"].unflatten(0, (A, 2)).flatten(1) for segments in rollouts], dim=1)
    assert torch.equal(actions, torch.stack(script.actions, dim=1))


def test_actions_do_not_depend_on_number_of_agents():
    # In float64, so that another batch size cannot round an action away.
    few, many = random_script(3, 40, 6), random_script(8, 40, 6)
    for name, values in few.tables.items():
        many.tables[name] = torch.cat([values, many.tables[name][3:]])
    live(make_reader().double(), few, rollouts=3)
    live(make_reader().double(), many, rollouts=3)
    for a, b in zip(few.actions, many.actions, strict=True):
        assert torch.equal(a, b[:3])


def test_another_seed_samples_other_actions():
    one, other = random_script(A, 40, 6), random_script(A, 40, 6)
    live(make_reader(), one, seed=1)
    live(make_reader(), other, seed=2)
    assert not torch.equal(torch.stack(one.actions), torch.stack(other.actions))


def test_states_carry_over_between_rollouts():
    script = random_script(A, 41, 7)
    _, (full,) = live(make_reader(), script, length=4 * T)
    _, halves = live(make_reader(), script, length=2 * T, rollouts=2)
    full, halves = full.steps.unflatten(0, (A, 2, 2)), [half.steps.unflatten(0, (A, 2)) for half in halves]
    for number, half in enumerate(halves):
        for key in ("actions", "values", "act_log_prob", "last_values"):
            assert torch.equal(full[:, number][key], half[key])


def test_truncation_bootstraps_from_last_obs():
    policy, script = make_reader(), random_script(A, 41, 8, ends=0.3)
    _, (segments,) = live(policy, script, length=8 * T)
    last_values = segments.steps["last_values"].unflatten(0, (A, 8)).flatten(1)
    truncated = table(script, "truncated", 0, 40)
    assert int(truncated.sum()) > 20
    assert not last_values[~truncated].any()
    _, states = by_hand(policy, script, 40)
    for t in range(40):
        # What was last seen, read with the memory of before the clear; nobody clears, nobody advances.
        with torch.no_grad():
            last = script.number(t)[:, None] - 0.5
            thought, _ = policy.unroll(last, torch.zeros(A, dtype=torch.bool), states[t])
        torch.testing.assert_close(last_values[:, t], torch.where(truncated[:, t], thought.values, 0.0))


def test_truncated_tail_has_last_value():
    cut = torch.zeros(A, 40, dtype=torch.bool)
    cut[1:, 2 * T] = True
    policy, script = make_reader(), Scripted(A, 40, truncated=cut)
    _, (segments,) = live(policy, script)
    _, states = by_hand(policy, script, 2 * T)
    with torch.no_grad():
        last = script.number(2 * T)[:, None] - 0.5
        thought, _ = policy.unroll(last, torch.zeros(A, dtype=torch.bool), states[-1])
    last_values = segments.tail["last_values"].unflatten(0, (A, 2))
    torch.testing.assert_close(last_values[1:, 1], thought.values[1:])
    assert last_values[0, 1] == 0
    assert not last_values[:, 0].any()


def test_world_that_never_truncates_needs_no_last_obs():
    policy = make_reader()
    world = Scripted(A, 40, truncates="never")
    calls = []
    original = policy.unroll
    policy.unroll = lambda *words: calls.append(1) or original(*words)
    live(policy, world)
    # Ten steps and one look at what the last tails are worth.
    assert len(calls) == 2 * T + 1


class Silent(Scripted):
    """Never returns last_obs."""

    def say(self):
        return dataclasses.replace(super().say(), last_obs=None)


def truncated_at(step):
    cut = torch.zeros(A, 40, dtype=torch.bool)
    cut[:, step] = True
    return cut


@pytest.mark.parametrize("step", [3, 2 * T])
def test_truncation_without_last_obs_is_an_error(step):
    with pytest.raises(ContractError, match=r"World Silent, reset.*no last_obs, .* truncates='always'; give"):
        live(make_reader(), Silent(A, 40, truncated=truncated_at(step)))


@pytest.mark.parametrize("step", [1, 2 * T - 1, 2 * T])
def test_a_truncation_in_a_world_that_never_truncates_is_an_error(step):
    with pytest.raises(ContractError, match=f"step {step}: agent 0 .* declares truncates='never'; declare"):
        live(make_reader(), Scripted(A, 40, truncates="never", truncated=truncated_at(step)))


def test_bootstrap_value_changes_no_live_state():
    policy = make_reader()
    live(policy, random_script(A, 40, 9))
    with torch.no_grad():
        before = policy.store.read(0, A).clone()
    obs, no_agents = torch.ones(A, 1), torch.zeros(A, dtype=torch.bool)
    state = policy.lstm.cell.initial(A)
    one = bootstrap_value(policy, state, obs, no_agents, no_agents)
    other = bootstrap_value(policy, before, obs, no_agents, no_agents)
    with torch.no_grad():
        assert bool((policy.store.read(0, A) == before).all())
    assert not torch.equal(one, other)
    assert not one.requires_grad
    assert not state["h"].any()


def test_invalid_steps_do_not_change_state():
    there = torch.ones(A, 40, dtype=torch.bool)
    there[1, 2:9] = False
    there[2, :] = False
    policy = make_reader()
    _, (segments,) = live(policy, Scripted(A, 40, valid=there))
    entry = segments.entry_state.unflatten(0, (A, 2))
    _, states = by_hand(policy, Scripted(A, 40, valid=there), 10)
    # Agent 1 acted twice before the second segment; agent 2 never did.
    torch.testing.assert_close(entry[1, 1]["h"], states[2]["h"][1])
    assert not entry[2, 1]["h"].any()
    with torch.no_grad():
        now = policy.store.read(0, A)
    assert not now["c"][2].any()
    # Agent 1 acts once more at step 9, and that alone moves its memory.
    assert not torch.equal(now["h"][1], entry[1, 1]["h"])
    torch.testing.assert_close(now["h"][1], states[10]["h"][1])


class Noisy(Scripted):
    """Shows absent agents something else."""

    noise = 500.0

    def say(self):
        step = super().say()
        noise = self.noise * (1 + self.t % 3)
        return dataclasses.replace(step, obs=torch.where(step.valid[:, None], step.obs, step.obs + noise))


def test_observations_of_invalid_agents_are_ignored():
    there = torch.rand(A, 40, generator=torch.Generator().manual_seed(3)) < 0.7
    calm, noisy = make_reader(), make_reader()
    _, (one,) = live(calm, Scripted(A, 40, valid=there))
    _, (other,) = live(noisy, Noisy(A, 40, valid=there))
    assert not torch.equal(one.steps["env_obs"], other.steps["env_obs"])
    assert torch.equal(one.entry_state["h"], other.entry_state["h"])
    for key in ("values", "act_log_prob", "actions"):
        assert torch.equal(one.steps[key], other.steps[key])


@pytest.mark.parametrize("noise", [500.0, float("nan")])
def test_observations_of_invalid_agents_after_the_rollout_are_ignored(noise):
    there = torch.ones(A, 40, dtype=torch.bool)
    there[1, 2 * T] = False
    loud = Noisy(A, 40, valid=there)
    loud.noise = noise
    _, (one,) = live(make_reader(), Scripted(A, 40, valid=there))
    _, (other,) = live(make_reader(), loud)
    assert torch.equal(one.tail["values"], other.tail["values"])
    # Nobody knows yet what comes: what the last step was worth stands in.
    assert one.tail["values"].unflatten(0, (A, 2))[1, 1] == one.steps["values"].unflatten(0, (A, 2))[1, 1, -1]


def test_stored_steps_have_no_graph():
    _, (segments,) = live(make_reader(), random_script(A, 40, 10))
    for part in (segments.steps, segments.entry_state, segments.tail):
        assert not any(leaf.requires_grad for leaf in part.values())


def test_segment_stores_one_entry_state():
    _, (segments,) = live(make_reader(), random_script(A, 40, 10))
    assert segments.entry_state.batch_size == (A * 2,)
    assert sum(leaf.numel() for leaf in segments.entry_state.values()) == A * 2 * (2 * 2 * 6)
    assert not {"h", "c"} & set(segments.steps.keys())


def test_segments_rows_select_all_fields():
    _, (segments,) = live(make_reader(), random_script(A, 40, 11))
    index = torch.tensor([5, 2])
    some = segments.rows(index)
    assert len(some) == 2
    assert some.version.equal(segments.version[index])
    for part in ("steps", "entry_state", "tail"):
        assert bool((getattr(some, part) == getattr(segments, part)[[5, 2]]).all())


class Crowded(OnlySpec):
    """Up to so many of 200 tokens are shown at each step."""

    def __init__(self, most):
        super().__init__(agents=2, spec=WorldSpec((200, 3), ("a", "b"), (Feature("x", 9.0),)))
        self.most, self.clock = most, 0

    def reset(self):
        self.clock = 0
        return self.step(torch.zeros(2).long())

    def step(self, actions):
        obs = tokens.empty(2, 200, torch.device("cpu"))
        obs[:, : self.most[self.clock % len(self.most)]] = torch.tensor([0x33, 0, 5]).to(torch.uint8)
        first = torch.full((2,), self.clock == 0)
        self.clock += 1
        flags = {key: torch.zeros(2, dtype=torch.bool) for key in ("terminated", "truncated", "trial")}
        return Step(obs, torch.zeros(2), first=first, valid=torch.ones_like(first), **flags)


@pytest.mark.parametrize("name", ["fast", "latent_attn_tiny", "component:fast", "component:latent_attn_tiny"])
def test_token_padding_of_a_rollout_is_trimmed(name):
    world = Crowded([10, 70, 3])
    policy = make_policy(name, world, seed=0, hidden_size=8)
    segments = Collector(world, policy, length=8, horizon=4, seed=0).rollout(0)
    assert segments.steps["env_obs"].shape == (4, 4, 80, 3)
    again = replay(policy, segments)
    torch.testing.assert_close(again["values"], segments.steps["values"], atol=1e-6, rtol=0)


def test_policy_that_needs_all_tokens_gets_padding():
    class Fixed(RecurrentPolicy):
        def __init__(self):
            super().__init__(600, 4, 1)
            self.out = torch.nn.Linear(4, 3)

        def encode(self, obs):
            return obs.flatten(1).float()

        def decode(self, features):
            out = self.out(features)
            return PolicyOutput(out[:, :2], out[:, 2])

    segments = Collector(Crowded([10]), Fixed(), length=8, horizon=4, seed=0).rollout(0)
    assert segments.steps["env_obs"].shape == (4, 4, 200, 3)


@pytest.mark.parametrize("missing", ["values", "act_log_prob", "actions", "full_log_probs"])
def test_missing_policy_output_is_an_error(missing):
    class Forgetful(NewLSTMPolicy):
        def forward(self, td, state=None, action=None):
            return super().forward(td, state, action).exclude(missing)

    world = Scripted(A, 12)
    with pytest.raises(ContractError, match=f"The policy's output has no {missing}"):
        Collector(world, Forgetful(world.spec), length=4, horizon=4, seed=0).rollout(0)


def test_buffer_has_dtype_of_policy_outputs():
    class Precise(NewLSTMPolicy):
        def forward(self, td, state=None, action=None):
            td = super().forward(td, state, action)
            td["values"] = td["values"].double()
            return td

    world = Scripted(A, 12)
    segments = Collector(world, Precise(world.spec), length=4, horizon=4, seed=0).rollout(0)
    assert segments.steps["values"].dtype == torch.float64
    assert segments.steps["act_log_prob"].dtype == torch.float32


def test_training_env_id_start_is_on_cpu():
    # From another device the host would have to wait for it in every step.
    flag = torch.zeros(3, dtype=torch.bool, device="meta")
    number = torch.zeros(3, device="meta")
    meta_step = Step(number[:, None], number, flag, flag, flag, flag, flag)
    batch = step_to_td(meta_step, 7, number)
    assert batch["rewards"].device.type == "meta"
    assert batch["training_env_id_start"].tolist() == [7, 7, 7]
