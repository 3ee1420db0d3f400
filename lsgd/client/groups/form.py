"""The group of a generation, over the transports that the servers chose."""

from collections.abc import Callable
from functools import partial

from lsgd.client.control.closing import on_error
from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Members, Traffic, WorkerGroup
from lsgd.client.groups.composed_group import ComposedGroup
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.routes import RelayedRoute, Routes
from lsgd.client.groups.store import ServerStore, store_of
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.client.groups.torch_group import torch_group
from lsgd.collectives.topology import node_ranks
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
    store, members = store_of(generation, membership), Members.of(generation, membership.join.worker)
    if generation.transport == "nccl":
        return torch_group(members, membership, store, traffic)
    inside: WorkerGroup | None = None
    if generation.homes[members.rank] in generation.nccl_nodes:
        ranks = [*node_ranks(members.rank, members.node_sizes)]

        def cut() -> None:
            store.end()
            mesh.cut()

        inside = torch_group(members.some("node", ranks, one_node=True), membership, store, traffic, when_cut=cut)
    mesh = _mesh(generation, membership, store, members, store.end if inside is None else inside.cut)
    if len(members.names) > 1:
        try:
            with on_error(mesh.close):
                mesh.gather()
        except (ExchangeError, OSError) as error:
            raise ExchangeError(f"the members of generation {generation.number} do not meet: {error}") from error
    between = TcpGroup(mesh, members, membership.plan.run.exchange_timeout_s, traffic)
    return ComposedGroup(members, inside, between) if generation.nccl_nodes else between


def _mesh(
    generation: Generation,
    membership: Membership,
    store: ServerStore,
    members: Members,
    when_cut: Callable[[], None],
) -> Mesh:
    """Return this member's connections to all others, none of them made yet."""
    welcome, me = membership.welcome, members.rank
    home, apart = generation.homes, {*zip(generation.missed[::2], generation.missed[1::2], strict=True)}

    def relayed(source: int, target: int, nonce: bytes) -> RelayedRoute:
        relay, secret = membership.relay
        ticket = Ticket(welcome.run.encode(), generation.number, source, target, of_target=target == me)
        return RelayedRoute(relay, ticket, secret, nonce)

    routes = partial(Routes, missed=lambda one, other: (home[one], home[other]) in apart, relayed=relayed)
    here = me, members.names, membership.address, store, welcome.certificate
    timeout_s = membership.plan.run.exchange_timeout_s
    return Mesh(welcome.run, generation.number, *here, timeout_s, routes, when_cut=when_cut)
