"""What the judges say of facts: each mistake has a fact of its own, and its line."""

import pytest

from lsgd.check.changes import judge_changes
from lsgd.check.costs import judge_cost
from lsgd.check.data import judge_data
from lsgd.check.endings import judge_calls, judge_ends, judge_model
from lsgd.check.rates import judge_rates
from lsgd.check.returns import DATA, judge_resume, judge_return
from lsgd.check.runs import link_all
from lsgd.check.verdicts import Status, Verdict
from lsgd.plan.estimate import link_of
from tests import golden

from .story import Story, at, run_of


def both(tell) -> tuple[Story, Story]:
    """Return the same story of two workers."""
    stories = Story(0), Story(1)
    for story in stories:
        tell(story)
    return stories


def says(verdict: Verdict, line: int, *words: str) -> None:
    """Assert that a verdict names one mistake, in this line, in these words."""
    (finding,) = verdict.findings
    assert finding.where == at(line)
    for word in words:
        assert word in finding.what


def is_right(verdict: Verdict) -> bool:
    return verdict.status is Status.RIGHT


# -- 1 ---------------------------------------------------------------------------------------------------------

WELL = run_of(*both(lambda story: story.steps(8).ends()))


def test_runs_that_end_with_a_consensus_are_right() -> None:
    assert is_right(judge_ends(WELL, WELL))


def test_a_run_that_was_not_stopped_is_no_tick() -> None:
    assert judge_ends(WELL, None).status is Status.UNJUDGED


def test_a_loop_that_was_stopped_before_its_end_is_said() -> None:
    run = run_of(*both(lambda story: story.steps(4).ends()), stopped=True)
    verdict = judge_ends(run, WELL)
    assert is_right(verdict) and golden.text("judges.own_loop") in verdict.notes[0]


def test_a_loop_without_the_end_that_it_has_told() -> None:
    says(judge_ends(run_of(*both(lambda story: story.steps(60)), status=None), WELL), 25, "60 steps", "steps are 8")


def test_a_script_that_joins_nothing() -> None:
    verdict = judge_ends(run_of(status=78, logs={"launcher": "[launch] failed: without training"}), None)
    assert golden.text("judges.never_joined") in verdict.findings[0].what


def test_an_error_is_named_with_its_line(tmp_path) -> None:
    path = tmp_path / "train.py"
    log = f'  File "{path}", line 12, in <module>\n  File "/usr/lib/python3.11/x.txt", line 1\nKeyError: 3\n'
    run = run_of(*both(lambda story: story.steps(4)), status=1, logs={"node0-worker0": log}, name="stopped")
    (finding,) = judge_ends(WELL, run).findings
    assert finding.where == f"{path}:12" and golden.text("judges.exit_code") in finding.what


def test_steps_after_the_end() -> None:
    says(
        judge_ends(run_of(*both(lambda story: story.steps(4).steps(40, over=True)), status=None), WELL),
        *(25, "goes on after the end of its run"),
    )


@pytest.mark.parametrize("looks", [True, False])
def test_the_rest_of_what_is_learned_from_a_rollout_is_no_mistake(looks: bool) -> None:
    def tell(story: Story) -> None:
        if looks:
            story.tell("read", name="stopped", where=at(20))
        story.steps(4).steps(15, over=True).ends()

    verdict = judge_ends(run_of(*both(tell)), WELL)
    if looks:
        assert is_right(verdict) and golden.text("judges.steps_after_end") in verdict.notes[0]
    else:
        says(verdict, 25, golden.text("judges.goes_on_after_end"))


def test_no_step_of_a_joined_optimizer() -> None:
    says(judge_ends(run_of(*both(Story.ends), waits="finish"), WELL), 9, "has made no step")


def test_an_end_without_finish() -> None:
    text = "the script ends after 8 steps without worker.finish(), so its model is not the run's consensus"
    run = run_of(*both(lambda story: story.steps(8).tell("warning", text=text, where="")), status=78)
    says(judge_ends(run, WELL), 25, "ends without finish()")


def test_what_hangs_is_said() -> None:
    stories = both(lambda story: story.steps(8).tell("at", where=at(30), call="barrier"))
    says(judge_ends(run_of(*stories, waits="worker0 waits in barrier()", status=None), WELL), 30, "waits in barrier()")


# -- 2 ---------------------------------------------------------------------------------------------------------


def test_parts_are_right() -> None:
    one, other = Story(0).draws([0, 2], [4, 6], divided=True), Story(1).draws([1, 3], [5, 7], divided=True)
    assert is_right(judge_data(run_of(one, other)))


@pytest.mark.parametrize("divided", [False, True])
def test_samples_that_both_draw(divided) -> None:
    one, other = Story(0).draws([0, 2], [4, 6], divided=divided), Story(1).draws([0, 2], [5, 7], divided=divided)
    says(judge_data(run_of(one, other)), 20, golden.text("judges.same_samples", share=50))


def test_an_evaluation_that_all_make_of_the_same_data_is_right() -> None:
    stories = Story(0).draws([0, 2]), Story(1).draws([1, 3])
    for story in stories:
        key = {"loader": 1, "number": 9}
        for _ in range(3):
            story.tell("batch", rows=[5], stream=False, samples=["sample 5"], digest="", where=at(30), **key)
        story.tell("pass_ends", **key).step()
    assert is_right(judge_data(run_of(*stories)))


def test_rows_of_subsets_have_numbers_of_their_own() -> None:
    one, other = Story(0).draws([0, 1]), Story(1).draws([1, 0])
    for fact in other.facts:
        if fact["kind"] == "batch":
            fact["samples"], fact["digest"] = ["sample 7", "sample 8"], "others"
    assert (
        not judge_data(run_of(one, other)).findings or "same batches" in judge_data(run_of(one, other)).findings[0].what
    )


def test_data_that_repeats_itself_is_not_drawn_by_both() -> None:
    """Each draws five samples twice that the other draws twice, too."""
    one, other = (Story(n).draws(list(range(20)), divided=True, sampler="Stream") for n in range(2))
    for worker, story in enumerate((one, other)):
        for fact in story.facts:
            if fact["kind"] == "batch":
                alone = [f"sample {worker} {row}" for row in range(10)]
                fact["digest"], fact["rows"] = str(worker), None
                fact["samples"] = alone + [f"sample {row // 2}" for row in range(10)]
    assert is_right(judge_data(run_of(one, other)))
    for story in (one, other):
        story.facts = [
            {**fact, "samples": [f"sample {row}" for row in range(20)]} if fact["kind"] == "batch" else fact
            for fact in story.facts
        ]
    says(judge_data(run_of(one, other)), 20, golden.text("judges.same_samples", share=100))


def test_rows_that_are_drawn_with_replacement_are_right() -> None:
    stories = (Story(n).draws([0, 1, 2, 0, 1, n + 3], divided=True, sampler="WeightedRandomSampler") for n in range(2))
    assert is_right(judge_data(run_of(*stories)))


def test_a_pass_of_a_trainer_is_of_several_deals() -> None:
    """It has as many batches as alone, so that one worker comes to what another has drawn in the deal before."""
    of_first = Story(0).draws([0, 2], [4, 6], [1, 3], sampler="Endless", divided=True)
    right = Story(1).draws([1, 3], [5, 7], [0, 2], sampler="Endless", divided=True)
    assert is_right(judge_data(run_of(of_first, right)))
    wrong = Story(1).draws([0, 2], [5, 7], [1, 3], sampler="Endless", divided=True)
    says(judge_data(run_of(of_first, wrong)), 20, golden.text("judges.same_samples", share=50))


def test_samples_that_nobody_draws() -> None:
    about = {"divided": True, "sampler": "ShardSampler"}
    one, other = Story(0).draws([0, 2], [4], **about), Story(1).draws([1, 3], [5], **about)
    says(judge_data(run_of(one, other)), 20, golden.text("judges.nobody_draws"))


def test_equal_batches_without_a_loader() -> None:
    stories = Story(0), Story(1)
    for story in stories:
        for number in range(4):
            story.tell("input", digest=f"batch {number}", where=at(24)).step()
    says(judge_data(run_of(*stories)), 25, golden.text("judges.same_batches"))


def test_equal_noise_is_named_where_it_was_seeded() -> None:
    stories = both(lambda story: story.tell("seed", what="torch.manual_seed", value="1", where=at(12)))
    for story in stories:
        for number in range(3):
            story.step(noise=[f"seeded {number}", f"{story.facts[0]['worker']}", "python"])
    says(judge_data(run_of(*stories)), 12, golden.text("judges.same_random_numbers"))


def test_equal_generators_that_nobody_draws_from_are_right() -> None:
    stories = both(lambda story: story.steps(4, noise=["torch", "numpy", "python"]))
    assert is_right(judge_data(run_of(*stories)))


# -- 3 ---------------------------------------------------------------------------------------------------------


def test_a_rate_that_differs_at_the_same_step() -> None:
    one, other = Story(0), Story(1)
    for number in range(6):
        one.step(lrs=[0.1 / (1 + number)])
        other.step(lrs=[0.1 / (1 + number) if number < 4 else 0.1])
    says(judge_rates(run_of(one, other)), 25, golden.text("judges.other_rate"))


def test_rates_by_progress_need_not_be_equal_at_equal_steps() -> None:
    one, other = Story(0, has_end=True), Story(1, has_end=True)
    for number in range(8):
        one.step(lrs=[1 - number / 8], progress=number / 8, steps=0)
    for number in range(4):
        other.step(lrs=[1 - number / 4], progress=number / 4, steps=0)
    assert is_right(judge_rates(run_of(one, other)))
    other.facts[-1]["lrs"] = [0.9]
    says(judge_rates(run_of(one, other)), 25, "0.9 at 75 % of the run")


@pytest.mark.parametrize(("length", "words"), [(80, "covers 10 % of it"), (4, "goes 200 % of its length")])
def test_a_schedule_of_another_length(length, words) -> None:
    about = {"name": "CosineAnnealingLR", "count": 4, "length": length, "optimizer": 0}
    stories = both(lambda story: story.tell("call", name="follow", where=at(15)).steps(4).tell("scheduler", **about))
    says(judge_rates(run_of(*stories)), 15, words)


def test_a_schedule_by_epoch_has_no_length_in_steps() -> None:
    about = {"name": "CosineAnnealingLR", "count": 1, "length": 3, "optimizer": 0}
    assert is_right(judge_rates(run_of(*both(lambda story: story.steps(6).tell("scheduler", **about)))))


def test_a_scheduler_that_nobody_has_told_of() -> None:
    about = {"module": "schedulers", "text": "a scheduler sets the learning rate, and lsgd does not know it"}
    stories = both(lambda story: story.step().tell("warning", where=at(26), level="WARNING", **about))
    says(judge_rates(run_of(*stories)), 26, golden.text("judges.unknown_rate"))


# -- 4 ---------------------------------------------------------------------------------------------------------

MOVED = {"names": ["weight"], "tensors": 2, "share": 0.5, "before": "step", "where": at(25)}


def test_weights_that_stay_changed() -> None:
    stories = both(lambda story: story.steps(4).tell("moved", by={at(32): 2}, **MOVED).steps(4))
    says(judge_changes(run_of(*stories)), 32, golden.text("judges.changes_between_steps"), "weight and 1 more")


def test_weights_that_are_put_back_are_right() -> None:
    stories = both(lambda story: story.steps(4).tell("undone", by={at(32): 1}).steps(4))
    assert is_right(judge_changes(run_of(*stories)))


def test_what_changes_weights_in_each_step_is_a_part_of_it() -> None:
    def tell(story: Story) -> None:
        for number in range(8):
            if number in (3, 6):  # it clips few
                story.tell("moved", by={at(28): number}, **MOVED)
            story.step()

    verdict = judge_changes(run_of(*both(tell)))
    assert is_right(verdict) and "in each step" in verdict.notes[0]


def test_an_optimizer_that_has_not_joined() -> None:
    stories = both(lambda story: story.step().tell("foreign", optimizer="SGD", where=at(27)))
    says(judge_changes(run_of(*stories)), 27, golden.text("judges.sgd_not_joined"))


# -- 5 ---------------------------------------------------------------------------------------------------------


def test_a_call_that_one_worker_makes_alone() -> None:
    one, other = Story(0).step().tell("call", name="mean", where=at(31)).step(), Story(1).steps(2)
    says(judge_calls(run_of(one, other)), 31, "node0/worker1 does not")


def test_calls_from_other_lines_are_right_if_all_make_as_many() -> None:
    one, other = (Story(k).step().tell("call", name="mean", where=at(31 + k)).step() for k in range(2))
    assert is_right(judge_calls(run_of(one, other)))


def test_calls_that_differ() -> None:
    error = "LsgdError: all workers must make the same calls"
    one, other = Story(0).step().tell("raised", name="mean", error=error, where=at(31)), Story(1).step()
    says(judge_calls(run_of(one, other)), 31, golden.text("judges.same_calls"))


def test_a_file_of_two_writers() -> None:
    stories = both(lambda story: story.step().tell("file", path="/x/model.pt", where=at(40), by="open"))
    says(judge_calls(run_of(*stories)), 40, golden.text("judges.same_file"))


# -- 6 and 7 ---------------------------------------------------------------------------------------------------


def resume(alone: Story, half: Story, resumed: Story, files=None, others=None) -> Verdict:
    """Judge a resumed run of one worker."""
    runs = [run_of(story, workers=1) for story in (alone, half, resumed)]
    return judge_resume(*runs, files or {}, others or {})


def back(**joined: object) -> Story:
    """Return the story of a worker that resumes at step 4."""
    return Story(0, step=4, **joined).tell("read", name="step", where=at(20))


def test_the_same_steps_are_right() -> None:
    assert is_right(resume(Story().steps(8).ends(), Story().steps(4).ends(), back().steps(4).ends()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lrs": [0.5]}, golden.text("judges.rate_at_4")),
        ({"weights": [0.0, 0.0]}, golden.text("judges.weights_from_4")),
    ],
)
def test_what_differs_after_a_resume_is_named(wrong, words) -> None:
    says(resume(Story().steps(8), Story().steps(4), back().steps(4, **wrong)), 25, words)


@pytest.mark.parametrize("source", ["loader", "keys", "stream", "by hand"])
def test_what_to_write_for_other_batches_after_a_resume_fits_to_what_they_come_from(source) -> None:
    def drawn(story: Story, *rows: int) -> Story:
        if source == "by hand":
            for row in rows:
                story.tell("input", digest=f"batch {row}", where=at(24)).step()
            return story
        story.draws(*([row, row] for row in rows))
        for fact in story.facts:
            if fact["kind"] == "batch" and source != "loader":
                fact["rows"], fact["stream"] = None, source == "stream"
        return story

    verdict = resume(drawn(Story(), *range(8)), drawn(Story(), *range(4)), drawn(back(), *range(4)))
    says(verdict, 24 + (source == "by hand") - 4 * (source != "by hand"), "its batches differ from step 4 on")
    assert verdict.findings[0].change == DATA["loader" if source == "keys" else source]


def test_other_random_numbers_after_a_resume_are_noted() -> None:
    verdict = resume(Story().steps(8), Story().steps(4), back().steps(4, noise=["another", "", ""], weights=[9.0, 9.0]))
    assert is_right(verdict) and golden.text("judges.random_differ") in verdict.notes[0]


def test_random_numbers_that_begin_anew_after_a_resume() -> None:
    story = back()
    for number in range(4):
        story.step(noise=[f"node0/worker0 {number} {k}" for k in range(3)])
    says(resume(Story().steps(8), Story().steps(4), story), 25, golden.text("judges.random_again"))


def test_a_stop_between_two_passes_of_a_script_that_draws_in_none_of_its_steps() -> None:
    """A pass draws a number as it begins, so after a stop between two the steps have the state of the one before."""

    def two_steps(story: Story, drawn: int) -> Story:
        return story.steps(2, noise=[f"{drawn} drawn", "", ""])

    alone, half = Story(), Story()
    for drawn in range(4):
        two_steps(alone, drawn)
    for drawn in range(2):
        two_steps(half, drawn)
    story = back().step(noise=["0 drawn", "", ""])  # as at its beginning; restored within the step
    verdict = resume(alone, half, two_steps(story.step(noise=["1 drawn", "", ""]), 2))
    assert is_right(verdict) and golden.text("judges.random_differ") in verdict.notes[0]


def test_rates_by_progress_may_be_a_step_off() -> None:
    def story(begin: int, end: int, off: int = 0) -> Story:
        made = Story(0, step=begin).tell("read", name="step", where=at(20))
        for place in range(begin, end):
            made.step(lrs=[1 - (place + off) / 40], progress=place / 40, steps=0)
        return made

    assert is_right(resume(story(0, 40), story(0, 20, off=1), story(20, 40, off=1)))
    verdict = resume(story(0, 40), story(0, 20), story(20, 40, off=-20))
    says(verdict, 25, golden.text("judges.rate_at_20"))


def test_other_batches_after_a_resume() -> None:
    alone, half = Story().draws([0], [1], [2], [3], [4], [5]), Story().draws([0], [1], [2], [3])
    says(resume(alone, half, back().draws([0], [1])), 20, golden.text("judges.batches_from_4"))


def test_a_loader_may_be_a_batch_ahead() -> None:
    alone, half, story = Story().draws([0], [1], [2], [3], [4], [5]), Story().draws([0], [1], [2], [3]), back()
    key = {"loader": 0, "number": 0}
    story.tell("batch", rows=[3], stream=False, samples=["3"], digest="3", where=at(20), **key).draws([4], [5])
    assert is_right(resume(alone, half, story))


def test_a_script_that_is_not_the_same_twice_is_not_judged() -> None:
    verdict = resume(Story().steps(8), Story().steps(4, lrs=[0.2]), back().steps(4))
    assert golden.text("judges.learning_rate_differs") in verdict.unjudged


def test_a_loop_that_begins_anew() -> None:
    alone, half = Story().steps(8), Story().steps(4)
    says(resume(alone, half, Story(0, step=4).steps(4)), 25, golden.text("judges.begins_at_0"))


def test_a_file_that_begins_anew() -> None:
    stories = Story().steps(8), Story().steps(4), back().steps(4)
    for story in stories:
        story.tell("file", path="/x/ema.pt", where=at(41), by="torch.save", over=True).ends()
    says(resume(*stories, {"ema.pt": {"a": "1"}}, {"ema.pt": {"a": "2"}}), 41, "ema.pt is another file")


def test_a_worker_that_comes_back_is_right() -> None:
    run = run_of(Story(0).steps(8), Story(1).steps(3), back2().steps(4), killed="node0/worker1")
    assert is_right(judge_return(run))


def back2(**joined: object) -> Story:
    return Story(1, step=4, restarted=True, **joined).tell("read", name="step", where=at(20))


def test_a_worker_that_comes_back_with_the_first_rate() -> None:
    one = Story(0)
    for number in range(8):
        one.step(lrs=[0.1 - number / 100])
    run = run_of(one, Story(1).steps(3), back2().steps(4, lrs=[0.1]), killed="node0/worker1")
    says(judge_return(run), 25, golden.text("judges.killed_other_rate"))


def test_a_worker_that_does_not_come_back() -> None:
    run = run_of(Story(0).steps(8), Story(1).steps(3), killed="node0/worker1", status=1, logs={"launcher": "it failed"})
    (finding,) = judge_return(run).findings
    assert golden.text("judges.not_back") in finding.what


# -- 8 and 9 ---------------------------------------------------------------------------------------------------


def saves(path: str = "/x/model.pt", **values: object) -> tuple[Story, Story]:
    """Return the stories of two workers of which the first saves after the end."""
    one, other = Story(0).steps(8).tell("call", name="finish", where=at(35)), Story(1).steps(8)
    one.tell("file", path=path, where=at(37), by="torch.save", over=True).ends(**values)
    return one, other.ends()


def test_one_model_and_its_file_are_right() -> None:
    assert is_right(judge_model(run_of(*saves()), {"/x/model.pt": {"model/module.weight": "w"}}))


def test_a_file_may_hold_an_average_of_the_weights_beside_them() -> None:
    assert is_right(judge_model(run_of(*saves()), {"/x/model.pt": {"model/weight": "w", "ema/module.weight": "e"}}))


def test_a_file_with_other_names_is_compared_by_its_values() -> None:
    assert is_right(judge_model(run_of(*saves()), {"/x/model.pt": {"lora.weight": "w"}}))
    verdict = judge_model(run_of(*saves()), {"/x/model.pt": {"lora.weight": "other"}})
    assert verdict.status is Status.UNJUDGED and golden.text("judges.nothing_restored") in verdict.unjudged


def test_an_average_that_one_worker_copies_into_its_model_at_the_end() -> None:
    one, other = saves(tensors="average")
    consensus = {"consensus": True, "tensors": {"weight": "w"}, "buffers": [], "over": True}
    for story in (one, other):
        story.facts.insert(-1, {"kind": "end", "t": 50.0, "made": 8, **consensus})
    verdict = judge_model(run_of(one, other), {"/x/model.pt": {"weight": "average"}})
    assert is_right(verdict) and golden.text("judges.alone_weights") in verdict.notes[0]


def test_no_file_is_no_tick() -> None:
    assert judge_model(run_of(*both(lambda story: story.steps(8).ends())), {}).status is Status.UNJUDGED


def test_two_models() -> None:
    one, other = saves()
    other.facts[-1]["tensors"] = {"weight": "another"}
    other.facts.insert(-1, {**MOVED, "kind": "moved", "by": {at(36): 1}, "before": "end", "over": True, "t": 90.0})
    says(judge_model(run_of(one, other), {"/x/model.pt": {"weight": "w"}}), 36, "ends with other weights")


def test_a_file_of_another_model() -> None:
    says(judge_model(run_of(*saves()), {"/x/model.pt": {"weight": "before"}}), 37, "is another model")


def test_a_file_from_before_the_consensus() -> None:
    one = Story(0).steps(8).tell("file", path="/x/model.pt", where=at(34), by="torch.save")
    one.tell("call", name="finish", where=at(35)).ends()
    run = run_of(one, Story(1).steps(8).ends())
    says(judge_model(run, {"/x/model.pt": {"weight": "w"}}), 34, golden.text("judges.saved_before"))


def test_a_checkpoint_within_the_training_is_no_final_file() -> None:
    one = Story(0).steps(4).tell("file", path="/x/best.pt", where=at(30), by="torch.save").steps(4)
    one.tell("call", name="finish", where=at(35)).ends()
    assert not judge_model(run_of(one, Story(1).steps(8).ends()), {"/x/best.pt": {"weight": "b"}}).findings


def test_costs_are_said_with_what_machines_are_worth() -> None:
    verdict = judge_cost(WELL, link_of("100mbit,20ms"))
    assert is_right(verdict) and golden.text("judges.rounds_share") in verdict.notes[1]
    small, large = Story(0, nbytes=4000).steps(8).ends(), Story(0, nbytes=4e6).steps(8).ends()
    assert verdict.notes[0].startswith("1 MB of memory")
    assert judge_cost(run_of(small), None).notes[0].endswith(golden.text("judges.parameters_kb"))
    assert judge_cost(run_of(large), None).notes[0].endswith(golden.text("judges.parameters_mb"))
    assert [note.split()[0] for note in verdict.notes[3:-1]] == ["2", "3", "4"] and "point 6" in verdict.notes[-1]
    alone = Story(0).steps(8).ends(watching_s=2.0)
    assert "250 ms a step" in judge_cost(WELL, link_of("100mbit"), run_of(alone)).notes[2]
    assert "--link" in judge_cost(WELL, None).notes[-1]


def test_the_scratch_folder_may_be_in_the_folder_of_the_script(tmp_path) -> None:
    scratch = tmp_path / "scratch"
    for path in (tmp_path / "data" / "rows.txt", scratch / "straight" / "log", tmp_path / "runs" / "old"):
        path.parent.mkdir(parents=True)
        path.write_text("text")
    link_all(tmp_path, scratch / "folder", scratch)
    assert [path.name for path in (scratch / "folder").iterdir()] == ["data"]
    assert (scratch / "folder" / "data" / "rows.txt").is_symlink()
