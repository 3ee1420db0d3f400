"""The group of a generation, over the transport that the servers have chosen."""

from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Traffic, WorkerGroup
from lsgd.client.groups.store import ServerStore
from lsgd.client.groups.tcp.group import TcpGroup
from lsgd.client.groups.tcp.mesh import Mesh
from lsgd.client.groups.tcp.tls import contexts
from lsgd.client.groups.torch_group import torch_group
from lsgd.protocol.messages import Generation


def form(generation: Generation, membership: Membership, traffic: Traffic | None = None) -> WorkerGroup:
    """Return the group of all members of ``generation``, as the worker of ``membership`` sees it.

    ``traffic`` counts what it sends and receives. Every verb, and the building of each group, has the deadline that
    the plan gives.
    """
    if generation.transport != "tcp":
        return torch_group(generation, membership, traffic)
    join, run = membership.join, membership.plan.run
    store = ServerStore(membership.channel, join.worker, join.incarnation, generation.number, run.exchange_timeout_s)
    names = generation.members
    me, certificate = names.index(join.worker), membership.welcome.certificate
    tls = contexts(certificate) if certificate else None
    mesh = Mesh(
        *(membership.welcome.run, generation.number, me, names, join.address, store, tls, run.exchange_timeout_s),
        when_cut=store.end,
    )
    return TcpGroup(mesh, "world", range(len(names)), names, me, generation.node_sizes, run.exchange_timeout_s, traffic)
