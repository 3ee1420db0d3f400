"""What people type by mistake: one error that says what is wrong and what to type."""

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from tests import golden

SCRIPT = ("--", "python", "script.py")
LAUNCH = ("launch", "--port", "0", "--device", "cpu")

MISTAKES = [
    (("lanch",), {}, "did you mean: lsgd launch"),
    (("keys",), {}, "did you mean: lsgd keygen"),
    (("launch",), {}, golden.text("mistakes.what_to_run")),
    (("launch", "--worker", "2", *SCRIPT), {}, "(Did you mean one of: '--store', '--workers'?)"),
    (("launch", "--workers", "0", *SCRIPT), {}, "0 is not in the range x>=1"),
    (("launch", "--log-to", "tensorbord", *SCRIPT), {}, "is not one of 'csv', 'tensorboard', 'wandb'"),
    (("launch", "--node", "1", *SCRIPT), {}, golden.text("mistakes.group_variable")),
    (("launch", "--nodes", "2", *SCRIPT), {}, golden.text("mistakes.which_node")),
    (("launch", "--nodes", "2", "--node", "0", *SCRIPT), {}, "IP_ADDR=10.0.0.1"),
    ((*LAUNCH, "--", "script.py"), {}, golden.text("mistakes.type_python")),
    ((*LAUNCH, "--", "no-such-program"), {}, "the command 'no-such-program' was not found"),
    ((*LAUNCH, "--resume", *SCRIPT), {}, "runs"),
    ((*LAUNCH, "--plan", "no.toml", *SCRIPT), {}, "the plan no.toml cannot be read"),
    ((*LAUNCH, *SCRIPT), {"LSGD_PERIODE": "4"}, "did you mean 'LSGD_PERIOD'?"),
    ((*LAUNCH, *SCRIPT), {"LSGD_PERIOD": "often"}, golden.text("plan.no_integer_or_auto", setting="'often'")),
    ((*LAUNCH, *SCRIPT), {"LSGD_ALGORITHM": "leadr"}, "did you mean 'leader'?"),
    ((*LAUNCH, *SCRIPT), {"LSGD_ITERATIONS": "-5"}, "is not at least 0"),
    ((*LAUNCH, *SCRIPT), {"LSGD_COMPRESSION": "zip"}, "known: float16"),
    (
        (*LAUNCH, *SCRIPT),
        {"LSGD_ALGORITHM": "bytegrad", "LSGD_PERIOD": "4"},
        "bytegrad has no setting 'period'",
    ),
    (("up", *SCRIPT), {"LSGD_PERIODE": "4"}, "did you mean 'LSGD_PERIOD'?"),
    (("up", "--plan", "no.toml", *SCRIPT), {}, "the plan no.toml cannot be read"),
    (("launch", "--device", "gpu", "--port", "0", *SCRIPT), {}, golden.text("mistakes.devices")),
    (("launch", "--device", "cpu", "--run-dir", "/proc/x", *SCRIPT), {}, golden.text("mistakes.no_folder")),
    (("status",), {}, golden.text("mistakes.no_run")),
    (("status", "--connect", "10.0.0.1"), {}, golden.text("mistakes.no_port")),
    (("status", "--connect", "10.0.0.1:27400"), {}, golden.text("mistakes.keygen")),
    (("set",), {}, "lsgd set period=16"),
    (("set", "period"), {}, golden.text("mistakes.name_value")),
    (("log",), {}, "Missing option '--to'"),
    (("algorithms", "foo"), {}, "algorithm 'foo' is unknown; known: allreduce"),
    (("config", "show", "--plan", "no.toml"), {}, "the plan no.toml cannot be read"),
    (("completion", "fisch"), {}, "is not one of 'bash', 'zsh', 'fish'"),
    (("runs", "nowhere"), {}, golden.text("mistakes.runs_folder")),
]


@pytest.mark.parametrize(("arguments", "variables", "said"), MISTAKES, ids=[" ".join((*m[0], *m[1])) for m in MISTAKES])
def test_a_mistake_is_said_with_what_to_type(arguments, variables, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("")
    result = CliRunner().invoke(main, arguments, env=variables, prog_name="lsgd")
    assert said in result.stderr.rpartition("Error: ")[2], result.output
    assert result.exit_code in (1, 2) or arguments[0] == "runs"
    assert not any(path.is_dir() for path in tmp_path.glob("runs/*")), "nothing is left"


@pytest.mark.parametrize(("text", "says"), [("x", "'x' is no number"), ("0", "'0' is no number")])
def test_doctor_takes_the_size_of_a_model_as_estimate_does(text: str, says: str) -> None:
    done = CliRunner().invoke(main, ["doctor", "--parameters", text])
    assert done.exit_code == 1 and golden.text("mistakes.whole_number", says=says) in done.output
