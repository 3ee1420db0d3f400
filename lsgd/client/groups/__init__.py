"""A generation's groups, over lsgd's own TCP connections or NCCL.

- :mod:`~lsgd.client.groups.form` chooses one of :mod:`~lsgd.client.groups.tcp_group` and
  :mod:`~lsgd.client.groups.torch_group`, whose members meet in :mod:`~lsgd.client.groups.store`.
- :mod:`~lsgd.client.groups.reach` finds out before who can dial whom.

Over TCP there is a connection for each pair of members and direction, in TLS where keys are needed:

- :mod:`~lsgd.client.groups.staging` takes tensors of a GPU through host memory, piece by piece.
- :mod:`~lsgd.client.groups.stream` has what a verb waits for, the streams on which its messages travel, and the threads
  that serve them; :mod:`~lsgd.client.groups.stream_ends` has the two ends of a stream.
- :mod:`~lsgd.client.groups.mesh` makes the connections, :mod:`~lsgd.client.groups.service` accepts them.
- :mod:`~lsgd.client.groups.routes` decides how a connection is made, and makes it.
- :mod:`~lsgd.client.groups.handshake` is what both ends send first.
"""
