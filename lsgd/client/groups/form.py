"""The group of a generation, over the transport that the servers chose."""

from functools import partial

from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Members, Traffic, WorkerGroup
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.routes import RelayedRoute, Routes
from lsgd.client.groups.store import store_of
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.client.groups.torch_group import torch_group
from lsgd.errors import ExchangeError
from lsgd.protocol.credentials import Ticket
from lsgd.protocol.messages import Generation


def form(generation: Generation, membership: Membership, traffic: Traffic | None = None) -> WorkerGroup:
    """Return the group of all members of ``generation``, for the worker of ``membership``.

    Every verb, and building each group, has the plan's deadline. Over TCP the group then knows where all members are,
    and no longer needs the servers.

    Raises:
        ExchangeError: a member does not come, or the generation is over.
    """
    if generation.transport == "nccl":
        return torch_group(generation, membership, traffic)
    welcome, timeout_s = membership.welcome, membership.plan.run.exchange_timeout_s
    members, store = Members.of(generation, membership.join.worker), store_of(generation, membership)
    me, names = members.rank, members.names
    home, apart = generation.homes, {*zip(generation.missed[::2], generation.missed[1::2], strict=True)}

    def relayed(source: int, target: int, nonce: bytes) -> RelayedRoute:
        relay, secret = membership.relay
        ticket = Ticket(welcome.run.encode(), generation.number, source, target, of_target=target == me)
        return RelayedRoute(relay, ticket, secret, nonce)

    routes = partial(Routes, missed=lambda one, other: (home[one], home[other]) in apart, relayed=relayed)
    here = me, names, membership.join.address, store, welcome.certificate
    mesh = Mesh(welcome.run, generation.number, *here, timeout_s, routes, when_cut=store.end)
    if len(names) > 1:
        try:
            mesh.gather()
        except (ExchangeError, OSError) as error:
            mesh.close()
            raise ExchangeError(f"the members of generation {generation.number} do not meet: {error}") from error
    return TcpGroup(mesh, members, timeout_s, traffic)
