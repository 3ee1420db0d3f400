"""torchft's LocalSGD and DiLoCo. The library may live in an environment of its own."""

import contextlib
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.baselines.member import TIMEOUT, Attach, Member, Pair


def torchft(outer: bool) -> Attach:
    """LocalSGD of torchft, or its DiLoCo (``outer``) with the outer optimizer of lsgd's ``diloco``."""

    @contextlib.contextmanager
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
        os.environ.setdefault("RUST_LOG", "warn")  # or it says a dozen lines in each exchange
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo, LocalSGD

        lighthouse, found = None, [""]
        if member.rank == 0:
            lighthouse = LighthouseServer(bind="[::]:0", min_replicas=member.size)
            found = [f"http://{member.first_address}:{urlsplit(lighthouse.address()).port}"]
        dist.broadcast_object_list(found, 0)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            member.address, 0, is_master=True, wait_for_workers=False
        )
        os.environ["MASTER_ADDR"] = member.address
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            min_replica_size=member.size,
            load_state_dict=lambda state: model.load_state_dict(state),
            state_dict=model.state_dict,
            replica_id=f"replica{member.rank}",
            store_addr=member.address,
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=found[0],
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            hostname=member.address,
            init_sync=False,  # or it sends the whole model in its first exchange, and all go on from one worker's
        )
        if outer:
            outer_step = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            context = DiLoCo(manager, [model], optimizer, outer_step, sync_every=member.period)
        else:
            context = LocalSGD(manager, model, optimizer, sync_every=member.period)
        with context:
            yield model, optimizer
        dist.barrier()
        manager.shutdown(wait=False)
        del store
        if lighthouse is not None:
            lighthouse.shutdown()

    return attach
