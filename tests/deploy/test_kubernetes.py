"""deploy/kubernetes/: manifests fit the schemas of Kubernetes, JobSet and Kubeflow, and the launcher they start."""

import itertools
import json
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.node.place import find_place
from lsgd.plan.plan import read
from lsgd.protocol.keys import KeyRing, connector_keys
from lsgd.run_folder import RESULT

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate", exc_type=ImportError)

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]


def manifests(name: str) -> dict[str, Manifest]:
    """Return the documents of a file by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def job_of(kinds: dict[str, Manifest]) -> Manifest:
    """Return the JobSet's only job, or that of the runtime, as a manifest of its own."""
    spec = kinds["JobSet"]["spec"] if "JobSet" in kinds else kinds["TrainingRuntime"]["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}, **replicated["template"]}


def variables(pod: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["containers"][0]["env"]}


FILES = pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])


@FILES
def test_core_kinds_fit_the_schemas_of_kubernetes(name: str) -> None:
    kinds = manifests(name)
    job = job_of(kinds)
    job["metadata"].setdefault("name", "node")
    for manifest in (kinds["PersistentVolumeClaim"], job):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("jobset.yaml", "JobSet", "JobsetV1alpha2JobSet"),
        ("trainjob.yaml", "TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
        ("trainjob.yaml", "TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_custom_kinds_have_only_fields_that_their_models_know(name: str, kind: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", exc_type=ImportError)  # takes half a second
    manifest = manifests(name)[kind]
    known = getattr(models, model).from_dict(manifest).to_dict()
    assert list(unknown(manifest, known)) == []


def unknown(given: Any, known: Any, path: str = "") -> Any:
    """Yield the places of what a model has dropped."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key in known:
                yield from unknown(value, known[key], f"{path}.{key}")
            elif value != {}:
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(known, list):
        for index, (one, other) in enumerate(itertools.zip_longest(given, known)):
            yield from unknown(one, other, f"{path}[{index}]")


@FILES
def test_the_launcher_takes_what_a_pod_gives_it(name: str) -> None:
    kinds = manifests(name)
    pod = job_of(kinds)["spec"]["template"]["spec"]
    trainer = kinds.get("TrainJob", {}).get("spec", {}).get("trainer", pod["containers"][0])
    for args in (trainer["args"], pod["containers"][0]["args"]):
        here = [each.replace("/opt/lsgd", str(FOLDER.parents[1])) for each in args]
        with main.commands[args[0]].make_context(args[0], here[1:]) as context:
            assert read(context.params["plan_path"], {}, {}).plan.run.iterations  # the script has a schedule
            assert context.params["resume_if_any"] and context.params["run_dir"]
            assert context.params["command"][0] == "python"
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert str(context.params["run_dir"].parent) in mounts
    if name == "jobset.yaml":
        job, network = job_of(kinds)["spec"], kinds["JobSet"]["spec"]["network"]
        told = variables(pod) | {"JOB_COMPLETION_INDEX": "1"}
        address = (
            f"{kinds['JobSet']['metadata']['name']}-{job_of(kinds)['metadata']['name']}-0-0.{network['subdomain']}"
        )
        nodes = job["completions"]
        assert job["parallelism"] == nodes and job["completionMode"] == "Indexed"
    else:  # what Kubeflow's torch plugin sets
        address, nodes = "digits-node-0-0.digits", kinds["TrainingRuntime"]["spec"]["mlPolicy"]["numNodes"]
        told = {"PET_NODE_RANK": "1", "PET_NNODES": str(nodes), "PET_MASTER_ADDR": address, "JOB_COMPLETION_INDEX": "1"}
        assert kinds["TrainJob"]["spec"]["runtimeRef"]["name"] == kinds["TrainingRuntime"]["metadata"]["name"]
    place = find_place(None, None, None, told)
    assert (place.node, place.nodes, place.address) == (1, nodes, address)


@FILES
def test_the_keys_of_the_secret_let_a_node_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = job_of(manifests(name))["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["secret"]["secret"]["secretName"] == "lsgd-keys"
    assert "secret generic lsgd-keys" in (FOLDER / name).read_text()
    assert CliRunner().invoke(main, ["keygen", "--nodes", "2", "--keys", str(tmp_path / "made")]).exit_code == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    data = {file: b64encode(text).decode() for file, text in files.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "lsgd-keys"}, "data": data}
    kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
    (mounted := tmp_path / "secret").mkdir(mode=0o777)  # with the modes of a secret's volume
    for file, text in files.items():
        (mounted / file).write_bytes(text)
        (mounted / file).chmod(0o644)
    (tmp_path / "keys").mkdir(mode=0o777)

    def here(text: str) -> str:
        return text.replace("/secret", str(mounted)).replace("/keys", str(tmp_path / "keys"))

    subprocess.run([here(word) for word in pod["initContainers"][0]["command"]], check=True)
    ring = Path(here(variables(pod)["LSGD_KEYS"]))
    monkeypatch.setenv("LSGD_KEYS", str(ring))
    KeyRing.make(ring, ["node0", "node1", "operator"])
    assert {path.name: path.read_bytes() for path in ring.iterdir()} == files  # nothing had to be made anew
    assert connector_keys("tcp://10.0.0.1:27400", None, "node1", insecure=False)


@FILES
def test_probes_ask_the_global_server_on_node_0_alone(name: str) -> None:
    (container,) = job_of(manifests(name))["spec"]["template"]["spec"]["containers"]
    for probe in (container["startupProbe"], container["livenessProbe"]):
        shell, flag, line = probe["exec"]["command"]
        rank = "JOB_COMPLETION_INDEX" if name == "jobset.yaml" else "PET_NODE_RANK"
        address = "MASTER_ADDR" if name == "jobset.yaml" else "PET_MASTER_ADDR"
        told = {rank: "1", address: "node0", "PATH": "/usr/bin:/bin"}
        assert subprocess.run([shell, flag, line], env=told, check=False).returncode == 0
        line = line.replace("lsgd status", "echo lsgd status")
        said = subprocess.run([shell, flag, line], env=told | {rank: "0"}, stdout=subprocess.PIPE)
        program, *arguments = said.stdout.decode().split()
        with main.commands[arguments[0]].make_context(program, arguments[1:]) as context:
            assert context.params["healthy"] and context.params["connect"] == "node0:27400"


@FILES
def test_a_run_that_is_over_is_healthy(name: str, tmp_path: Path) -> None:
    """Its server has ended, and its scripts go on."""
    (container,) = job_of(manifests(name))["spec"]["template"]["spec"]["containers"]
    shell, flag, line = container["livenessProbe"]["exec"]["command"]
    line = line.replace("lsgd status", "false").replace("/runs/digits", str(tmp_path))
    rank = "JOB_COMPLETION_INDEX" if name == "jobset.yaml" else "PET_NODE_RANK"
    for state, healthy in (("", False), ("running", False), ("over", True), ("finished", True)):
        if state:
            (tmp_path / RESULT).write_text(json.dumps({"state": state}, indent=2))
        done = subprocess.run([shell, flag, line], env={rank: "0", "PATH": "/usr/bin:/bin"}, check=False)
        assert (done.returncode == 0) is healthy
