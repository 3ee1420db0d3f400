"""Groups over lsgd's own TCP connections: one for each pair of members and direction, in TLS where keys are needed.

- :mod:`~lsgd.client.groups.tcp.group` has the verbs.
- :mod:`~lsgd.client.groups.tcp.staging` takes tensors of a GPU through host memory, piece by piece.
- :mod:`~lsgd.client.groups.tcp.line` moves bytes one way, :mod:`~lsgd.client.groups.tcp.outgoing` and
  :mod:`~lsgd.client.groups.tcp.incoming` are its ends.
- :mod:`~lsgd.client.groups.tcp.loop` is the thread that serves the lines of one direction.
- :mod:`~lsgd.client.groups.tcp.work` is what a verb waits for.
- :mod:`~lsgd.client.groups.tcp.mesh` makes the connections, :mod:`~lsgd.client.groups.tcp.service` accepts them.
- :mod:`~lsgd.client.groups.tcp.routes` decides how a connection is made.
- :mod:`~lsgd.client.groups.tcp.hello` is what both ends send first.
- :mod:`~lsgd.client.groups.tcp.tls` makes TLS contexts from the run's certificate.
"""
