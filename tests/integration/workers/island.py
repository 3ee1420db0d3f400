"""One process of an island: a small model, sharded by FSDP2 or in DDP, with switches for what a test is about.

Each process appends a line for each committed round to ``<name>.<rank>.rounds``: its number, and a digest of its parts;
and at the end a line with the bytes that it sent, those of its parts, and its
calls of the other processes. The head writes the rest to ``<name>.json``.
With ``--gradients`` each process writes, for each step, its gradients before and after the exchange to
``<name>.<rank>.gradients``.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lsgd import shards
from lsgd.client import Worker, muon
from lsgd.client.iteration import chunks, following, handover

DEEDS = ("kill", "die", "freeze", "nan", "spoil", "cut", "raise", "pause", "drift", "part")
parser = argparse.ArgumentParser()
parser.add_argument("--copied", action="store_true", help="as if torch kept shards otherwise")
parser.add_argument("--plain", action="store_true", help="do not shard the model")
parser.add_argument("--ddp", action="store_true", help="put the model in DistributedDataParallel instead")
parser.add_argument("--unlike", action="store_true", help="change the model of all but the head before the join")
parser.add_argument("--mean", action="store_true", help="average a number over all processes of two workers")
parser.add_argument("--alike", action="store_true", help="all processes of a worker draw the same batches")
parser.add_argument("--dim", type=int, default=0, help="that the first layer is sharded in")
parser.add_argument("--at", type=int, default=0, help="do this to one process after so many iterations:")
parser.add_argument("--do", default="", choices=("", *DEEDS))
parser.add_argument("--who", default="node0/worker1", help="worker of the process that it is done to, its last one")
parser.add_argument("--compile", action="store_true", help="and checkpoint activations")
parser.add_argument("--adamw", default="foreach", choices=("foreach", "fused", "single"), help="its implementation")
parser.add_argument("--muon", action="store_true", help="for its matrices")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--accumulate", type=int, default=1, help="batches in each step")
parser.add_argument("--leave-at", type=int, default=-1, help="leave after so many iterations")
parser.add_argument("--rest", type=float, default=0.0, help="seconds to sleep in each turn while it is alone")
parser.add_argument(
    "--once", default="", help="file that says that it has been done; who is alone waits for its return"
)
parser.add_argument("--common", action="store_true", help="the digests are of what all workers share")
parser.add_argument("--gradients", action="store_true", help="keep the gradients of all steps")
parser.add_argument("--slow-link", action="store_true", help="newcomers get a chunk or two between rounds, small ones")
options = parser.parse_args()

dist.init_process_group("gloo")
process, processes = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
# Seven rows over two processes are uneven shards, and a bias of one element is whole on the first.
model = nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 8), nn.Linear(8, 1))
model[3].weight.requires_grad_(False)
model.insert(4, nn.Linear(8, 8)).insert(5, nn.Linear(8, 8))
model[5].weight = model[4].weight
if options.compile:
    importlib.import_module("torch._dynamo").reset()  # the compiler is loaded now, not in the middle of another import
    for layer in (0, 3, 4):
        model[layer] = checkpoint_wrapper(model[layer])
if not options.plain and not options.ddp:
    mesh = init_device_mesh("cpu", (processes,))
    place = torch.distributed.tensor.Shard(options.dim)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None)
    fully_shard(model[0], mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: place if p.dim() > 1 else None)
    fully_shard(model[1], mesh=mesh)  # batch norm is computed in float32
    fully_shard(model[3], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
if options.compile:  # inductor takes a minute for its C++
    model.compile(backend="aot_eager")
whole: nn.Module = nn.parallel.DistributedDataParallel(model) if options.ddp else model
if options.unlike and process:
    with torch.no_grad():
        model[0].weight.add_(1.0)
if options.slow_link:  # the last process is faster
    for module in (chunks, handover, following):
        module.CHUNK_NBYTES = 64  # type: ignore[attr-defined]
    handover.Handover._meet = lambda self, seconds, meet=handover.Handover._meet: meet(self, seconds) and 60.0  # type: ignore[method-assign, misc]
    following.Following._chunks_in = lambda self, seconds: 1 + process  # type: ignore[method-assign]
if options.copied:
    shards._kept = lambda model: [object()]  # type: ignore[assignment, list-item, return-value]
implementation = {"foreach": False} if options.adamw == "single" else {options.adamw: True}
optimizer: torch.optim.Optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=0.02, **implementation
)
if options.muon:
    optimizer = muon(model, lr=0.02)
inputs = torch.randn(513, 8, generator=torch.Generator().manual_seed(1))  # the last one would be a batch of its own
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

trained = [p for p in model.parameters() if p.requires_grad]
own: dict[torch.Tensor, torch.Tensor] = {}  # gradients of this pass, before they are exchanged
steps: list[list[list[torch.Tensor]]] = []  # of all steps: these, and what the exchange has made of them
spoil = False
for parameter in trained:

    def note(parameter: nn.Parameter) -> None:
        """Note a gradient, or spoil it."""
        assert parameter.grad is not None
        gradient = shards.local(parameter.grad)
        if spoil:
            gradient.view(-1)[:1] = float("nan")
        own[parameter] = gradient.clone()

    parameter.register_post_accumulate_grad_hook(note)  # before the worker's own


def do(worker: Worker) -> None:
    """Do to this process what was asked for."""
    if options.once:
        if os.path.exists(options.once):
            return
        open(options.once, "w").close()
    global spoil
    print(f"{worker.name} process {process}: {options.do}", flush=True)
    group = worker._steps.rounds.groups.current
    match options.do:
        case "kill":

            def die_at_the_vote(judged: object) -> list[float]:
                """Die when the exchange is done and the vote is due."""
                os.kill(os.getpid(), signal.SIGKILL)
                return []

            worker._membership.island.vote = die_at_the_vote  # type: ignore[method-assign]
        case "die":  # before it sends any of its gradients

            def die(*arguments: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            worker._replica.algorithm.exchange_bucket = die  # type: ignore[attr-defined]
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spoil":
            spoil = True
        case "raise":
            raise RuntimeError("as asked for")
        case "cut":
            assert group is not None
            group.cut()
        case "pause":
            with worker.pause():
                pass
        case "drift" | "part":
            with torch.no_grad():
                model[0].weight.mul_(1.0 + (1e-6 if options.do == "drift" else 0.1))
        case "nan":
            with torch.no_grad():
                shards.local(model[0].weight)[0, 0] = float("nan")


if os.path.exists(options.once):
    open(f"{options.once}.returned", "w").close()
with Worker.join(whole, optimizer) as worker:
    assert worker.run_dir is not None
    path = worker.run_dir / worker.name.replace("/", "-")
    loader = worker.loader(data, batch_size=8)
    if options.alike:
        drawn = torch.Generator().manual_seed(int(worker.name[-1]))
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=drawn)  # type: ignore[assignment]
    losses: list[float] = []
    norms: list[float] = []
    committed = 0
    struck = options.do and worker.name == options.who and process == processes - 1
    with open(f"{path}.{process}.rounds", "a") as rounds:
        while not worker.stopped:
            for x, y in worker.batches(loader):
                if worker._steps.rounds.last.committed > committed:
                    committed = worker._steps.rounds.last.committed
                    parts = worker._replica.algorithm.shared_state() if options.common else model.parameters()
                    held = b"".join(shards.local(p).detach().numpy().tobytes() for p in parts)
                    print(committed, hashlib.sha256(held).hexdigest()[:16], file=rounds, flush=True)
                last = (len(losses) + 1) % options.accumulate == 0
                with nullcontext() if last else whole.no_sync() if options.ddp else worker.no_sync():
                    loss = nn.functional.mse_loss(whole(x).float(), y)
                    loss.backward()
                spoil = False
                if options.gradients and last:
                    steps.append([[own[p] for p in trained], [shards.local(p.grad).clone() for p in trained]])
                worker.report(loss)
                losses.append(loss.item())
                if len(losses) % options.accumulate:
                    continue
                # The norm of shards is summed in another order, so that only "no limit" leaves the same bits.
                most = math.inf if options.alike else 1.0
                norm = nn.utils.clip_grad_norm_(model.parameters(), most, foreach=True)
                norms.append(float(norm.full_tensor() if shards.is_sharded(norm) else norm))
                optimizer.step()
                optimizer.zero_grad()
                done = os.path.exists(options.once)  # until then the other one only pauses
                while worker.world_size == 1 and done and not os.path.exists(f"{options.once}.returned"):
                    time.sleep(0.02)
                time.sleep(options.rest if worker.world_size == 1 else 0.0)
                if struck and worker.iterations == options.at:
                    do(worker)
                if options.mean and worker.iterations == 10:
                    with torch.no_grad():
                        whole(x)  # leaves the root gathered
                    place = process + 2 * int(worker.name[-1])  # the rank is another one while the other worker pauses
                    assert worker.mean({"place": place}) == {"place": 1.5}
                if worker.iterations == 5:
                    together = options.alike or worker._replica.lockstep  # others would go on without who pauses
                    with nullcontext() if together else worker.pause(), torch.no_grad():
                        whole(x)  # leaves the root gathered
                if worker.iterations == options.leave_at:
                    worker.leave()
        calls = worker._membership.island._calls
        flat = sum(buffer.nbytes for buffer in worker._replica.flat.buffers)
        if options.gradients:
            torch.save(steps, f"{path}.{process}.gradients")
        print("sent", worker.timings.sent_nbytes, flat, calls, file=rounds)
    if worker.rank == 0:
        saved = worker.save(worker.run_dir / "model", file_nbytes=200)
        assert len(saved) > 4 or (options.ddp and process)
    state = worker.state_dict()
    leader = worker.leader_state_dict()
    assert (options.ddp or worker.is_head) == bool(state)
    assert (leader is not None) == worker.plan.run.leads(worker.algorithm) and (not leader or bool(state))
    if worker.is_head:
        names = sorted(name for name in state if state[name].is_floating_point())
        result = {
            "state": hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in names)).hexdigest(),
            "shapes": {name: list(state[name].shape) for name in names},
            "leader": leader and hashlib.sha256(b"".join(leader[name].numpy().tobytes() for name in names)).hexdigest(),
            "losses": losses,
            "norms": norms,
            "distance": worker.consensus_distance,
            "iterations": worker.iterations,
            "world_size": worker.world_size,
        }
        path.with_suffix(".json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
print("ended well", file=sys.stderr)
