"""Teachers: hidden states of their own that are never stale, and coefficients that decay."""

import copy

import pytest
import torch

import holdfast
from helpers.one_update import learner_for, replay_loss
from helpers.scripted_world import make_reader, random_script
from holdfast.config.trainer import PPOConfig, TeacherConfig
from holdfast.errors import ContractError
from holdfast.learn import Teacher
from holdfast.learn.advantage import Targets
from holdfast.rollout import Collector
from holdfast.worlds import WorldSpec

A, T, S = 5, 4, 3
PLAIN = PPOConfig(ent_coef=0.0, vf_coef=0.0)


def knobs(**words):
    return TeacherConfig(run="runs/teacher", **words)


def collect_rollouts(rollouts=3, seed=0):
    """Rollouts of a student, with starts and invalid steps anywhere."""
    policy = make_reader(seed=7).double()
    world = random_script(A, S * T * rollouts + 2, seed, 0.1, 0.2)
    collector = Collector(world, policy, length=S * T, horizon=T, seed=seed)
    return [copy.deepcopy(collector.rollout(version)) for version in range(rollouts)]


def lesson(name="teacher", seed=1, batch_size=2, **words):
    return Teacher(name, make_reader(seed=seed).double(), knobs(**words), agents=A, batch_size=batch_size)


def in_order(parts):
    """Concatenate the rows of rollouts per agent."""
    return torch.cat([part.unflatten(0, (A, S)).flatten(1, 2) for part in parts], dim=1)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_teacher_outputs_equal_its_own_rollout(batch_size):
    rollouts, teacher = collect_rollouts(), lesson(batch_size=batch_size)
    teacher_outputs = [teacher.run(segments, 0) for segments in rollouts]
    steps = {key: in_order([each.steps[key] for each in rollouts]) for key in ("env_obs", "first", "valid")}
    same = make_reader(seed=1).double()
    with torch.no_grad():
        thoughts, _ = same.unroll(steps["env_obs"], steps["first"], same.lstm.cell.initial(A), steps["valid"])
    values = in_order([each.values for each in teacher_outputs])
    torch.testing.assert_close(values[steps["valid"]], thoughts.values[steps["valid"]])
    logits = thoughts.logits.log_softmax(-1)
    torch.testing.assert_close(
        in_order([each.params for each in teacher_outputs])[steps["valid"]], logits[steps["valid"]]
    )


def test_teachers_have_separate_states():
    rollouts = collect_rollouts(2)
    alone = lesson()
    expected = [alone.run(segments, 0).values for segments in rollouts]
    student = make_reader(seed=7).double()
    Collector(random_script(A, 30, 0, 0.1, 0.2), student, length=4, horizon=2, seed=0).rollout(0)
    live = student.store.snapshot().tree
    first, second = lesson(), lesson("other", seed=2)
    for segments, values in zip(rollouts, expected, strict=True):
        one, other = first.run(segments, 0), second.run(segments, 0)
        assert torch.equal(one.values, values)
        assert not torch.equal(other.values, values)
    assert bool((student.store.snapshot().tree == live).all())


def test_teacher_weights_anneal_independently():
    segments = collect_rollouts(1)[0]
    early, late = lesson("early", steps=100, anneal=0.5, action=2.0), lesson("late", steps=1000, anneal=0.5)

    def outputs(segments, step):
        return [output for teacher in (early, late) if (output := teacher.run(segments, step)) is not None]

    weights = {
        step: {each.name: (each.action, each.value) for each in outputs(segments, step)} for step in (0, 75, 100, 750)
    }
    assert weights[0] == {"early": (2.0, 1.0), "late": (1.0, 1.0)}
    assert weights[75] == {"early": (1.0, 0.5), "late": (1.0, 1.0)}
    assert weights[100] == {"late": (1.0, 1.0)}
    assert weights[750] == {"late": (0.5, 0.5)}


def test_teacher_loss_is_cross_entropy_and_squared_distance():
    (segments,) = collect_rollouts(1)
    student = make_reader(seed=7).double()
    output = lesson(action=0.3, value=0.7).run(segments, 0)
    nothing = Targets(*(torch.zeros_like(segments.steps["values"]) for _ in range(2)))
    plain, _, _ = replay_loss(student, segments, nothing, PLAIN)
    loss, report, judged = replay_loss(student, segments, nothing, PLAIN, teacher_outputs=[output])
    valid = segments.steps["valid"]
    again = holdfast.learn.replay(student, segments)
    crossed = -(output.params.exp() * again["full_log_probs"].detach()).sum(-1)[valid].mean()
    apart = (judged["values"].detach() - output.values)[valid].square().mean()
    assert float(report["losses/teacher_action@teacher"]) == pytest.approx(float(crossed))
    assert float(report["losses/teacher_value@teacher"]) == pytest.approx(float(apart))
    torch.testing.assert_close((loss - plain).detach(), 0.3 * crossed + 0.7 * apart)


def test_student_converges_to_teacher():
    rollouts, teacher = collect_rollouts(6), lesson(action=30.0)
    with torch.no_grad():
        # A teacher with opinions.
        teacher.policy.outwards.weight *= 8
    student, learner, distances = make_reader(seed=7).double(), None, []
    for segments in rollouts:
        learner = learner or learner_for(student, segments, PLAIN, rows=5, epochs=8)
        output = teacher.run(segments, 0)
        with torch.no_grad():
            again = holdfast.learn.replay(student, segments)
        apart = student.actions.kl(output.params, again["full_log_probs"])[segments.steps["valid"]]
        distances.append(float(apart.mean()))
        learner.update(segments, teacher_outputs=[output])
    assert distances[0] > 0.05
    assert distances[-1] < distances[0] / 3, distances


def test_teacher_with_other_action_distribution_is_refused():
    teacher = lesson()
    teacher.policy.actions = holdfast.policies.distributions.Gaussian(2)
    with pytest.raises(ContractError, match="Teacher teacher has the action distribution Gaussian"):
        teacher.require_same_actions(make_reader())


def test_teacher_weights_are_frozen():
    (segments,) = collect_rollouts(1)
    teacher = lesson()
    before = copy.deepcopy(teacher.policy.state_dict())
    student = make_reader(seed=7).double()
    learner_for(student, segments, rows=5).update(segments, teacher_outputs=[teacher.run(segments, 0)])
    after = teacher.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_restarted_agents_lose_the_states_of_teachers():
    teacher, mask = lesson(batch_size=2), torch.tensor([True, False, False, True, True])
    store, slices = teacher.policy.store, {0: 2, 2: 2, 4: 1}
    for start, length in slices.items():
        store.write(start, store.read(start, length).apply(torch.ones_like))
    teacher.reset_agents(mask)
    states = torch.cat([store.read(start, length)["h"].flatten(1) for start, length in slices.items()])
    assert torch.equal(states, (~mask)[:, None].expand_as(states).double())


def test_actions_that_a_teacher_does_not_know_are_named():
    teacher, spec = lesson(), WorldSpec((1,), ("left", "right", "up", "down"))
    assert teacher.unknown_names(spec) == ""
    teacher.policy.binding.actions = ("right", "left")
    assert teacher.unknown_names(spec) == "teacher teacher does not have the actions up, down; their probability is 0."
    assert teacher.unknown_names(WorldSpec((1,), ("left", "right"))) == ""
