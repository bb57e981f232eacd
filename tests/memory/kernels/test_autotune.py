import math
from dataclasses import astuple

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton import testing

from holdfast.errors import ContractError
from holdfast.memory import kernels
from holdfast.memory.kernels import autotune
from holdfast.memory.kernels.autotune import LaunchPlan, TuningJob

UNSPLIT = LaunchPlan(16, 128, 4)


@given(
    kernel=st.sampled_from(["lstm_forward", "lstm_backward", "gru_forward", "gru_backward"]),
    hidden=st.integers(1, 32).map(lambda k: 16 * k),
    rows=st.integers(1, 100_000),
    dtype=st.sampled_from(kernels.DTYPES),
    processors=st.integers(16, 200),
)
def test_every_job_has_few_candidates_of_powers_of_two(kernel, hidden, rows, dtype, processors):
    job = TuningJob(kernel, hidden, rows, False, dtype, "tf32")
    plans = autotune.candidates(job, processors)
    assert 2 <= len(plans) <= 6
    for plan in plans:
        assert all(size & (size - 1) == 0 for size in (plan.rows, plan.units, plan.warps, plan.chunk))
        assert plan.units >= hidden or -(-hidden // plan.units) <= plan.share * processors


def test_jobs_are_told_apart_by_name():
    job = TuningJob("lstm_forward", 128, 2048, False, torch.bfloat16, "tf32")
    name = "lstm forward, segments of 2048 rows, hidden size 128, bfloat16 (tf32)"
    assert autotune._key(job) == name
    assert autotune._key(job._replace(keep=False)) == f"{name}, no gradients"
    assert autotune._key(job._replace(kernel="gru_backward", one_step=True)) == (
        "gru backward, a step of 2048 rows, hidden size 128, bfloat16 (tf32)"
    )


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 200))
def test_few_rows_are_split_as_long_as_all_programs_run_at_once(rows, hidden, processors):
    job = TuningJob("lstm_forward", hidden, rows, False, torch.bfloat16, "tf32")
    plans = autotune.candidates(job, processors)
    programs = math.ceil(rows / 16) * math.ceil(hidden / 32)
    if hidden > 64:
        assert (plans[0].rows == 16 and plans[0].units == 32) == (programs <= processors)
    if 64 < hidden <= 128:
        # Narrow programs first while they fit, wide ones first beyond.
        assert plans[0].rows == (16 if min(programs, math.ceil(rows / 16)) <= processors else 32)


class TestChoosePlan:
    JOB = TuningJob("lstm_forward", 128, 2000, False, torch.bfloat16, "tf32")

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch, tmp_path):
        """A fake GPU on which the plan with the fewest rows is the slowest."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(autotune, "_signature", lambda device: "a gpu")
        monkeypatch.setattr(autotune, "processors_of", lambda device: {"cuda": 132}[device.type])
        monkeypatch.setattr(testing, "do_bench", lambda run, **how: -float(run().rows))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        autotune._plans.clear()
        autotune._print_once.cache_clear()
        yield
        autotune._plans.clear()

    def choose(self, launched, job=JOB):
        def run(plan):
            launched.append(plan)
            return plan

        return autotune.choose_plan(job, torch.device("cuda"), run)

    def test_fastest_plan_is_timed_once_and_cached(self, capsys):
        launched = []
        best = self.choose(launched)
        assert best == max(autotune.candidates(self.JOB.rounded(), 132), key=lambda plan: plan.rows)
        assert len(launched) > 1
        self.choose(launched, self.JOB._replace(rows=5000))
        assert capsys.readouterr().err.count("timing kernels for this GPU") == 1
        before = len(launched)
        assert self.choose(launched, self.JOB._replace(rows=1500)) == best
        autotune._plans.clear()
        assert self.choose(launched) == best
        assert len(launched) == before

    def test_small_sizes_take_the_first_plan_that_fits(self, capsys, tmp_path):
        job = self.JOB._replace(rows=100)
        plans = autotune.candidates(job.rounded(), 132)

        def launch(plan):
            if plan == plans[0]:
                raise triton.OutOfResources(1, 0, "shared memory")

        for _ in range(2):
            assert autotune.choose_plan(job, torch.device("cuda"), launch) == plans[1]
        assert capsys.readouterr().err == ""
        assert list(tmp_path.iterdir()) == []

    def test_graph_capture_uses_the_smallest_plan_without_timing(self, monkeypatch, tmp_path):
        launched = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert self.choose(launched) == autotune.SMALLEST
        assert launched == []
        assert list(tmp_path.iterdir()) == []

    def test_plans_are_cached_in_the_home_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        self.choose([])
        folder = tmp_path / "home" / ".cache" / "holdfast"
        assert sorted(file.name for file in folder.iterdir()) == ["kernels.json", "kernels.lock"]

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"a gpu": 3}', '{"a gpu": {"a": [1, 2]}}'])
    def test_damaged_cache_is_timed_again(self, damage, tmp_path):
        launched = []
        best = self.choose(launched)
        autotune._plans.clear()
        file = tmp_path / "holdfast" / "kernels.json"
        file.write_text(damage)
        assert self.choose(launched) == best
        autotune._plans.clear()
        count = len(launched)
        self.choose(launched)
        assert len(launched) == count

    def test_loaded_plans_take_precedence_over_the_cache(self, tmp_path):
        best = self.choose([])
        carried = autotune.all_plans()
        autotune._plans.clear()
        (tmp_path / "holdfast" / "kernels.json").unlink()
        other = {signature: {key: list(astuple(UNSPLIT)) for key in jobs} for signature, jobs in carried.items()}
        autotune.load_plans(other)
        launched = []
        assert self.choose(launched) == UNSPLIT != best
        assert launched == []

    @pytest.mark.parametrize("table", [None, 3, {"a gpu": 3}, {"a gpu": {"a": [1, 2]}}, {"a gpu": {"a": ["x"] * 6}}])
    def test_malformed_plans_are_not_loaded(self, table):
        autotune.load_plans(table)
        assert autotune.all_plans() == {}

    def test_first_of_two_processes_sets_the_cached_plan(self):
        best = self.choose([])
        signature, key = "a gpu", autotune._key(self.JOB.rounded())
        assert autotune._save_plan(signature, key, UNSPLIT) == list(astuple(best))
        assert autotune._save_plan(signature, "another", UNSPLIT) == list(astuple(UNSPLIT))
        assert set(autotune._read_cache(autotune._cache_file())[signature]) == {key, "another"}

    def test_other_runtime_errors_are_raised(self, monkeypatch):
        def bench(run, **how):
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(testing, "do_bench", bench)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            self.choose([])

    def test_plan_that_does_not_fit_is_skipped(self, monkeypatch):
        def bench(run, **how):
            plan = run()
            if plan != autotune.SMALLEST:
                raise RuntimeError("too many blocks in cooperative launch")
            return 1.0

        monkeypatch.setattr(testing, "do_bench", bench)
        assert self.choose([]) == autotune.SMALLEST

    def test_no_plan_that_fits_is_an_error(self, monkeypatch):
        def bench(run, **how):
            raise RuntimeError("too many blocks in cooperative launch")

        monkeypatch.setattr(testing, "do_bench", bench)
        with pytest.raises(ContractError, match=r"policy.kernel=torch"):
            self.choose([])

    def test_unwritable_cache_warns(self, tmp_path):
        (tmp_path / "holdfast").write_text("")
        with pytest.warns(UserWarning, match="times its kernels again"):
            self.choose([])
