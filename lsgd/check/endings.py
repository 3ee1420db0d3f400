"""Points 1, 5 and 8: how a script ends, whom it waits for, and what it leaves."""

import re
from collections.abc import Iterator, Mapping, Sequence

from lsgd.check.facts import Life, Run
from lsgd.check.verdicts import Finding, Verdict, distinct
from lsgd.script_lines import innermost

COLLECTIVE = ("mean", "barrier", "finish", "leave")
"""Calls in which all workers meet."""

ENDS = "worker.finish()"
WITHOUT = "without worker.finish()"
"""What lsgd says of a script that ends so."""

MANY = 10
"""More steps after the end than this are no rest of a pass."""

_FRAME = re.compile(r'File "([^"]+\.py)", line (\d+)')
_LINE = re.compile(r"^(?:\S*Error\b.*|.* ends with exit code \d+: .*)$", re.MULTILINE)


# -- 1 ---------------------------------------------------------------------------------------------------------


def judge_ends(straight: Run, stopped: Run | None) -> Verdict:
    """Judge how it joins, steps and ends."""
    verdict = Verdict(1)
    for run in filter(None, (straight, stopped)):
        verdict.findings += _ended_badly(run)
        late = max(map(_steps_after, run.firsts), default=0)
        if late >= MANY and not verdict.findings:
            verdict.notes.append(f"it makes {late} steps after the end, which change nothing: it looks for it rarely")
    lives = straight.firsts
    if not verdict.findings and stopped is None:
        verdict.unjudged = "the run in which it is stopped was left out"
    loop = max((life.loop for life in lives), default=0)
    if straight.stopped and loop:
        verdict.notes.append(f"its own loop has {loop} steps, and was stopped before: --steps {loop} lets it end")
    verdict.findings = distinct(verdict.findings)
    return verdict


def _ended_badly(run: Run) -> Iterator[Finding]:
    when = "stopped in the middle" if run.name == "stopped" else "run"
    if not run.lives:
        where, why = crash_of(run)
        what = why or "its script ends without joining the run" if not run.waits else run.waits
        yield Finding(where, f"no worker has joined: {what}", "join with Worker.join, lsgd.wrap or LsgdCallback")
        return
    goes_on = [life for life in run.firsts if _steps_after(life) >= MANY and not _ends_late(run, life)]
    for life in goes_on:
        last = life.of("step")[-1]
        what = f"{life.worker} goes on after the end of its run ({when}): its steps change nothing"
        yield Finding(last["where"], what, "if worker.stopped: break")
    endless = [life for life in run.firsts if life.is_endless]
    for life in endless:
        what = f"{life.worker} has made {life.made} steps, and its worker.steps are {life.loop} ({when})"
        yield Finding(life.of("step")[-1]["where"], what, "while worker.step < worker.steps and not worker.stopped:")
    goes_on += endless
    idle = [life for life in run.firsts if not life.made]
    for life in idle:
        what = f"{life.worker} has made no step: no optimizer that joined has stepped"
        yield Finding((life.joined or {}).get("where", ""), what, "join with the optimizer that the loop steps")
    early = [life for life in run.firsts if any(WITHOUT in fact["text"] for fact in life.of("warning"))]
    for life in early:
        what = f"{life.worker} ends without finish(), so its model is not the run's consensus ({when})"
        yield Finding(life.of("step")[-1]["where"], what, f"after the loop: {ENDS}")
    if idle or early:
        return
    if run.waits and not goes_on:
        yield Finding(_waits_at(run), f"nothing moves any more ({when}): {run.waits}")
        return
    if goes_on:
        return
    if run.status != 0:
        where, why = crash_of(run)
        yield Finding(where or _last_line(run), f"it ends with exit code {run.status} ({when}): {why}")
        return
    for life in run.firsts:
        yield from _ended_early(life, when)


def _ended_early(life: Life, when: str) -> Iterator[Finding]:
    end = life.last("exit")
    if end is None:
        return
    finished = any(fact["name"] in ("finish", "leave") for fact in life.of("call"))
    if not end["consensus"]:
        what = f"{life.worker} ends without the run's consensus ({when}): it calls no finish() after its loop"
        last = life.of("step")[-1]
        yield Finding(last["where"], what, f"after the loop: {ENDS}" if not finished else "")


def _ends_late(run: Run, life: Life) -> bool:
    """Whether it has looked for the end, and ended after the rest of a pass, or of what it learns from a rollout."""
    return run.status is not None and any(fact["name"] == "stopped" for fact in life.of("read"))


def _steps_after(life: Life) -> int:
    return sum(fact["over"] for fact in life.of("step"))


def _waits_at(run: Run) -> str:
    at = [fact["where"] for life in run.lives if (fact := life.last("at")) and fact["call"]]
    return at[0] if at else _last_line(run)


def _last_line(run: Run) -> str:
    facts = [fact for life in run.lives for fact in life.facts if fact["kind"] not in ("at", "exit")]
    found = [fact for fact in facts if fact.get("where")]
    return str(max(found, key=lambda fact: float(fact["t"]))["where"]) if found else ""


def crash_of(run: Run) -> tuple[str, str]:
    """Return the line of the script at which a worker ended with an error, and what that was."""
    for name, log in run.logs.items():
        if "worker" not in name and run.lives:
            continue
        said = _LINE.findall(log)
        if not said:
            continue
        where = innermost((path, int(line)) for path, line in _FRAME.findall(log))
        return f"{where[0]}:{where[1]}" if where else "", said[-1].strip()[:600]
    launcher = [line for line in run.logs.get("launcher", "").splitlines() if line.strip()]
    return "", launcher[-1][:600] if launcher else ""


# -- 5 ---------------------------------------------------------------------------------------------------------


def judge_calls(run: Run) -> Verdict:
    """Judge the calls that all must make, and who saves."""
    verdict = Verdict(5)
    lives = run.firsts
    if len(lives) < run.workers:
        verdict.unjudged = "not all workers have joined"
        return verdict
    verdict.findings += _unmatched(run, lives)
    for life in lives:
        verdict.findings += _raised(life)
        verdict.findings += _warned(life)
    verdict.findings += _written_by_several(lives)
    verdict.findings = distinct(verdict.findings)
    return verdict


def _meetings(life: Life) -> list[tuple[str, str]]:
    """Return the calls in which all meet, by name and line, while the run was under way."""
    return [(f["name"], f["where"]) for f in life.of("call") if f["name"] in ("mean", "barrier") and not f["over"]]


def _unmatched(run: Run, lives: Sequence[Life]) -> Iterator[Finding]:
    met = {life.worker: _meetings(life) for life in lives}
    if run.waits or run.status != 0:
        for life in lives:
            calls = met[life.worker]
            at = life.last("at")
            if at and at["call"] in ("mean", "barrier") and calls:
                others = [other.worker for other in lives if len(met[other.worker]) < len(calls)]
                if others:
                    what = f"{life.worker} waits in {calls[-1][0]}() for {', '.join(others)}, which does not call it"
                    yield Finding(calls[-1][1], what, "let all workers call it, outside of `if worker.first:`")
    lines = {worker: {line for _, line in calls} for worker, calls in met.items()}
    for line in set.union(*lines.values()) if lines else set():
        without = [worker for worker, has in lines.items() if line not in has]
        if without and len(without) < len(lines):
            has = next(worker for worker in lines if worker not in without)
            count = sum(where == line for _, where in met[has])
            fewest = min(life.made for life in lives)
            if count and fewest and max(map(len, met.values())) > min(map(len, met.values())):
                what = f"{has} calls worker.mean() or barrier() here, and {', '.join(without)} does not"
                yield Finding(line, what, "let all workers call it, outside of `if worker.first:`")


def _raised(life: Life) -> Iterator[Finding]:
    for fact in life.of("raised"):
        if fact["name"] in COLLECTIVE and "must make the same calls" in fact["error"]:
            yield Finding(fact["where"], fact["error"], "let all workers make the same calls in the same order")


def _warned(life: Life) -> Iterator[Finding]:
    """Yield what lsgd has said of evaluations that cost steps."""
    for fact in life.of("warning"):
        if "evaluates, which belongs in" in fact["text"]:
            yield Finding(fact["where"], fact["text"], "with worker.pause(): ...")


def _written_by_several(lives: Sequence[Life]) -> Iterator[Finding]:
    writers: dict[str, dict[str, str]] = {}
    for life in lives:
        for fact in life.of("file"):
            writers.setdefault(fact["path"], {})[life.worker] = fact["where"]
    for path, by in writers.items():
        if len(by) > 1:
            what = f"{len(by)} workers write the same file, {path.rpartition('/')[2]}"
            yield Finding(next(iter(by.values())), what, "if worker.first: ...")


# -- 8 ---------------------------------------------------------------------------------------------------------


def judge_model(run: Run, saved: Mapping[str, Mapping[str, str]]) -> Verdict:
    """Judge the models at the end, and the files.

    Args:
        run: the straight one.
        saved: digests of the tensors in each file that can be loaded, by its path.
    """
    verdict = Verdict(8)
    ends = {life.worker: end for life in run.firsts if (end := life.last("exit")) is not None and end["consensus"]}
    if len(ends) < run.workers:
        verdict.unjudged = "not all workers have ended with the run's consensus"
        return verdict
    changed = [life for life in run.firsts if _changed_since(life)]
    if len(changed) == 1:  # such as an average of the weights that the first one copies into the model to save it
        (life,) = changed
        where, _ = _changed_after(run)
        line = f", at {where}" if where else ""
        verdict.notes.append(f"{life.worker} alone changes its weights after the run's end{line}")
        ends[life.worker] = life.of("end")[-1]
    last, *others = ends.values()
    for worker, other in zip(list(ends)[1:], others, strict=True):
        for kinds, what in ((False, "weights"), (True, "buffers")):
            names = {name for name in last["tensors"] if (name in last["buffers"]) == kinds}
            apart = sorted(name for name in names if other["tensors"].get(name) != last["tensors"][name])
            if apart:
                where, change = _changed_after(run)
                verdict.findings.append(
                    Finding(where, f"{worker} ends with other {what} than {next(iter(ends))}: {apart[0]}", change)
                )
    verdict.findings += _saved_otherwise(run, saved)
    if not verdict.findings and not _compares(run, saved):
        why = "the script has saved no file that can be loaded"
        if saved:
            why = "in the files that the script has saved nothing has the name or the values of one of its tensors"
        verdict.unjudged = f"the workers end with one model, but {why}"
    verdict.findings = distinct(verdict.findings)
    return verdict


def _changed_since(life: Life) -> bool:
    """Return whether a worker's model at its exit is another one than that of the run's end, if that was seen."""
    end, last = life.last("end"), life.last("exit")
    if end is None or last is None or not end["consensus"]:
        return False
    return bool(end["tensors"] != last["tensors"])


def _changed_after(run: Run) -> tuple[str, str]:
    """Return what has changed the weights after the consensus."""
    for life in run.firsts:
        for fact in life.of("moved"):
            if fact["before"] == "end" and fact["by"]:
                return next(iter(fact["by"])), "change no weights after worker.finish(), or before it"
    return "", ""


def _saved_otherwise(run: Run, saved: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    for life in run.firsts:
        end = life.last("exit")
        written = [fact for fact in life.of("file") if fact["path"] in saved]
        final = [fact for fact in written if fact["over"]]
        steps = life.of("step")
        finish = life.last("call") if (life.last("call") or {}).get("name") == "finish" else None
        before = finish["t"] if finish else 0.0
        early = [fact for fact in written if steps and steps[-1]["t"] < fact["t"] < before]
        if early and early[-1] is written[-1]:
            fact = early[-1]
            what = f"{_name(fact)} is saved before the run's consensus: it is {life.worker}'s own model"
            yield Finding(fact["where"], what, f"save after {ENDS}")
        if final and end is not None:
            fact = final[-1]
            models = [each["tensors"] for each in life.of("end", "exit")]
            tensors = _named_alike(saved[fact["path"]], end["tensors"])
            apart = sorted(name for name in tensors if not any(model.get(name) in tensors[name] for model in models))
            if apart:
                what = f"{_name(fact)} is another model than that of the run's end: {apart[0]}"
                yield Finding(fact["where"], what, f"save model.state_dict() after {ENDS}")


def _compares(run: Run, saved: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether a file holds tensors of the model, by name or by value."""
    for life in run.firsts:
        end = life.last("exit")
        model: dict[str, str] = end["tensors"] if end is not None else {}
        for path in {fact["path"] for fact in life.of("file")} & saved.keys():
            if _named_alike(saved[path], model) or set(saved[path].values()) & set(model.values()):
                return True
    return False


def _named_alike(saved: Mapping[str, str], model: Mapping[str, str]) -> dict[str, set[str]]:
    """Return a file's tensors by the model's names, whatever stands before these in the file.

    A name may have several: the weights and their average, for example.
    """
    found: dict[str, set[str]] = {}
    for name, digest in saved.items():
        parts = name.split("/")
        for place in range(len(parts)):
            short = "/".join(parts[place:]).removeprefix("module.").removeprefix("_orig_mod.")
            if short in model:
                found.setdefault(short, set()).add(digest)
                break
    return found


def _name(fact: Mapping[str, str]) -> str:
    return fact["path"].rpartition("/")[2]
