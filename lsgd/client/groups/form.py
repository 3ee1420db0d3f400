"""The group of a generation, over the transport that the servers have chosen."""

from functools import partial

from torch._C._distributed_c10d import PrefixStore

from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Traffic, WorkerGroup
from lsgd.client.groups.relayed import Meet
from lsgd.client.groups.store import ServerStore
from lsgd.client.groups.tcp.group import TcpGroup
from lsgd.client.groups.tcp.mesh import Mesh
from lsgd.client.groups.tcp.routes import Routes
from lsgd.client.groups.tcp.tls import contexts
from lsgd.client.groups.torch_group import torch_group
from lsgd.protocol.messages import Generation
from lsgd.protocol.tickets import Ticket


def form(generation: Generation, membership: Membership, traffic: Traffic | None = None) -> WorkerGroup:
    """Return the group of all members of ``generation``, as the worker of ``membership`` sees it.

    ``traffic`` counts what it sends and receives. Every verb, and the building of each group, has the deadline that
    the plan gives.
    """
    if generation.transport != "tcp":
        return torch_group(generation, membership, traffic)
    join, run, welcome = membership.join, membership.plan.run, membership.welcome
    store = ServerStore(membership.channel, join.worker, join.incarnation, generation.number, run.exchange_timeout_s)
    names = generation.members
    me = names.index(join.worker)
    tls = contexts(welcome.certificate) if welcome.certificate else None
    home, apart = generation.homes, {*zip(generation.missed[::2], generation.missed[1::2], strict=True)}

    def meet(source: int, target: int, nonce: bytes) -> Meet:
        ticket = Ticket(welcome.run.encode(), generation.number, source, target, of_target=target == me)
        return Meet(welcome.relay, ticket, welcome.relay_secret, nonce)

    routes = partial(Routes, missed=lambda one, other: (home[one], home[other]) in apart, meet=meet)
    who = welcome.run, generation.number, me, names, join.address
    shard = membership.island.rank  # groups of the same shard of all members' models meet
    name = f"shard{shard}" if shard else "world"
    mesh = Mesh(*who, PrefixStore(name, store), tls, run.exchange_timeout_s, routes, when_cut=store.end)
    return TcpGroup(mesh, name, range(len(names)), names, me, generation.node_sizes, run.exchange_timeout_s, traffic)
