"""The dashboard as people see it: a real run with a dead and a stalled worker in a real browser."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from lsgd.cli.commands import main
from tests import golden

from ..needs import to_install
from .running import DEADLINE_S, LIGHT, until
from .test_crashes import EVERY, JournaledRun, kill

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LEASE_S = 60
SEEN_WITHIN_MS = 1000 * LEASE_S / 2  # the end of a lease would show it, too
WAIT_MS = DEADLINE_S * 1000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"Chromium not found: {to_install('chromium')}")


@pytest.fixture
def browser():
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser):
    """A page whose errors fail the test, those of its security policy too."""
    troubles = []
    made = browser.new_page(viewport={"width": 390, "height": 844})
    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    yield made
    assert [trouble for trouble in troubles if "ERR_CONNECTION_REFUSED" not in trouble] == []


@pytest.fixture
def dashboard():
    """Start the dashboard of a run; return its process and its address."""
    started = []

    def start(address, *options):
        command = [sys.executable, "-m", "lsgd.client", "dashboard", "--connect", address, "--port", "0", *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], re.search(r"http://\S+", started[-1].stdout.readline())[0]

    yield start
    for process in started:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


@pytest.mark.timeout(180)
@pytest.mark.alone
def test_a_dead_and_a_stalled_worker_are_seen_at_once(cluster, page, dashboard) -> None:
    run = JournaledRun(cluster, "--workers", "3", "--patience-s", "1", "--lease-s", str(LEASE_S), *EVERY)
    local = cluster.start_local()
    hold = cluster.folder / "hold"
    stalls = ((), ("--stall-while", hold), ())
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.01, *stalls[index], **LIGHT) for index in range(3)]
    process, url = dashboard(cluster.address, "--private")
    page.goto(url)
    assert "token" not in page.url

    def seen(what, within_ms=SEEN_WITHIN_MS):
        page.wait_for_function(f"() => {what}", timeout=within_ms, polling=50)

    def state(index):
        return f"document.querySelectorAll('#workers tr')[{index}]?.dataset.state"

    seen(
        "document.querySelectorAll('#workers tr[data-state=live], #workers tr[data-state=held]').length === 3", WAIT_MS
    )
    seen("document.querySelectorAll('#loss .legendtext').length === 5", WAIT_MS)  # three workers, consensus, leaders
    seen("document.querySelector('#timeline .heatmaplayer image')", WAIT_MS)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "the page is wider than a phone"

    kill(workers[2])
    seen(f"{state(2)} === 'left'")
    assert "process has ended" in page.locator("#workers tr").nth(2).inner_text()

    hold.touch()
    out = until(lambda: (s := cluster.status()["members"][1]["state"]) not in ("live", "held") and s, "it is out")
    assert out != "left"
    seen(f"{state(1)} === '{out}'")
    hold.unlink()
    seen(f"['live', 'held'].includes({state(1)})", WAIT_MS)

    kill(run.server)
    seen("document.getElementById('banner').innerText.includes('the global server')", WAIT_MS)
    run.start_again()
    seen("document.getElementById('banner').hidden", WAIT_MS)

    page.focus("#loss")
    before = page.evaluate("loss._fullLayout.xaxis.range[1]")
    page.keyboard.press("+")
    seen(f"loss._fullLayout.xaxis.range[1] < {before}")
    page.focus("input[name=name]")
    page.keyboard.type("period")
    page.keyboard.press("Tab")
    page.keyboard.type("16")
    page.keyboard.press("Enter")
    assert golden.text("dashboard.set_for_all") in page.inner_text("#asked")
    page.keyboard.press("Escape")
    assert cluster.status()["period"] == 12
    page.keyboard.press("Enter")
    page.evaluate("document.getElementById('question').dispatchEvent(new Event('close'))")  # as one that comes late
    page.click("#yes")
    seen("!['', '…'].includes(document.getElementById('answer').innerText)", WAIT_MS)
    assert page.inner_text("#answer").startswith("period = 16")

    page.click("#stop")
    assert "Stop the run?" in page.inner_text("#asked")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    seen("document.getElementById('state').innerText === 'over'", WAIT_MS)
    assert golden.text("dashboard.stopped_here") in page.inner_text("#reason")
    for each in (workers[0], workers[1], run.server, local):
        each.succeeds()
    process.terminate()
    seen("document.getElementById('banner').innerText.includes('this is the last state')")


@pytest.mark.slow
def test_a_launched_run_has_its_page_and_its_report(browser, tmp_path) -> None:
    script, begins = tmp_path / "train.py", tmp_path / "begins"
    os.mkfifo(begins)
    script.write_text(
        "import sys\n"
        "import torch\n"
        "open(sys.argv[1]).close()\n"  # until somebody writes there
        "from lsgd.client import Worker\n"
        "model = torch.nn.Linear(4, 1)\n"
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "with Worker.join(model, optimizer) as worker:\n"
        "    loader = worker.loader(data, batch_size=8)\n"
        "    while not worker.stopped:\n"
        "        for (x,) in worker.batches(loader):\n"
        "            loss = (model(x) - x.sum()).square().mean()\n"
        "            optimizer.zero_grad()\n"
        "            loss.backward()\n"
        "            optimizer.step()\n"
        "            worker.report(loss)\n"
    )
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lsgd.client", "launch", "--workers", "2", "--device", "cpu", "--dashboard"]
    environ = {**LIGHT, "LSGD_ALGORITHM": "local", "LSGD_PERIOD": "10", "LSGD_SECONDS": "4"}
    command += ["--run-dir", str(folder), "--", sys.executable, str(script), str(begins)]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=output, stderr=output)
    try:
        has_page = re.compile(r"dashboard: http://127\.0\.0\.1:\d+/$", re.MULTILINE)
        until(lambda: has_page.search((tmp_path / "output").read_text()), "the page is there")
        with begins.open("r+b", buffering=0):
            assert process.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()
    assert len(has_page.findall((tmp_path / "output").read_text())) == 1
    main(["report", str(folder)], standalone_mode=False)
    page = browser.new_page()
    requests, troubles = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("#loss .main-svg", timeout=WAIT_MS)
    page.wait_for_selector("#timeline .heatmaplayer image", timeout=WAIT_MS)
    assert page.inner_text("#state") == "finished"
    marked = page.evaluate("timeline.data.find((trace) => trace.marker?.symbol === 'diamond').y")
    assert set(marked) == {20}  # between both bands of 20 rows, as local has no leaders
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == [] == troubles
